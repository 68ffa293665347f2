"""Imported last by the process that all forked ones come from: what is there by then is no garbage, and none of them
searches it again. A training ends with such a search, which takes half of the time of a small one."""

import gc

gc.collect()
gc.freeze()
