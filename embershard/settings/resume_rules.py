"""Rules of a resume: what happens to a run that goes on from a checkpoint with another value of a setting.

Each setting has its rule in its type: `num_workers: Free[int] = 2`. `rules_of` collects them.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, TypeVar, get_origin, get_type_hints

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class ResumeRule:
    """What a resume does with a setting.

    Attributes:
        is_compared: a checkpoint has its value, and a resume refuses another one that was not allowed by name.
        compared_as: not its value is compared, but what it leads to, under this name.
        is_of_model: it says what a model's weights and inputs mean, so that data for the trained model need its value.
    """

    is_compared: bool
    compared_as: str | None = None
    is_of_model: bool = False


#: It may change: where and how fast a run trains, for how long, what it reports and saves. Caches, plans and placements
#: train the same rows by the same arithmetic; an epoch's order does not depend on the others. (In the mode "hot_cold"
#: it depends on the profile, and `AsOrder` compares it.) With another `data.bad_rows` the rows that were trained on are
#: as good as before, and a run that a bad row stopped can go on.
Free = Annotated[T, ResumeRule(is_compared=False)]
#: It changes the order of the data or the arithmetic of training.
OfTraining = Annotated[T, ResumeRule(is_compared=True)]
#: It says what the model's weights and inputs mean: a resume compares it, and so does everything that uses the model.
OfModel = Annotated[T, ResumeRule(is_compared=True, is_of_model=True)]
#: A path, or a pattern of names: the files that it finds are compared, by name, size and content.
AsFiles = Annotated[T, ResumeRule(is_compared=True, compared_as="data.files")]
#: The same of held-out files.
AsEvalFiles = Annotated[T, ResumeRule(is_compared=True, compared_as="data.eval_files")]
#: Whether batches are packed of hot and cold samples, and of which, is compared.
AsOrder = Annotated[T, ResumeRule(is_compared=True, compared_as="data.order")]
#: The samples of all ranks' step are compared.
AsGlobalBatch = Annotated[T, ResumeRule(is_compared=True, compared_as="train.global_batch_size")]


def rules_of(cls: type, section: str = "") -> dict[str, ResumeRule]:
    """Return the rule of every setting in a dataclass and in its sections, by `section.key`.

    Raises:
        TypeError: a setting has no rule.

    >>> from embershard.pipeline.config import LookAheadConfig
    >>> rules_of(LookAheadConfig, "look_ahead.")["look_ahead.prefetch"].is_compared
    False
    """
    found: dict[str, ResumeRule] = {}
    hints = get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        key, hint = section + field.name, hints[field.name]
        if dataclasses.is_dataclass(hint):
            found |= rules_of(hint, f"{key}.")  # type: ignore[arg-type]  # the class, no instance
            continue
        metadata = hint.__metadata__ if get_origin(hint) is Annotated else ()
        rule = next((each for each in metadata if isinstance(each, ResumeRule)), None)
        if rule is None:
            raise TypeError(f"the setting {key} has no rule of a resume. Write its type as {__name__}.Free[...] or so.")
        found[key] = rule
    return found
