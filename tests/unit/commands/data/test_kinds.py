"""Judging columns: by names and values as public data sets have them, and tables of measurements."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pytest

from embershard.data.sources.table.survey import survey
from embershard.extras.judging.kinds import Judgement, judge
from embershard.extras.judging.suggest import facts_of

pytestmark = pytest.mark.extra

ROWS = 2000
#: A table to a paragraph: its name; then columns as NAME KIND VALUES, where `|` is between kinds that are right, and
#: VALUES names a function of `Values`.
TABLES = """
movielens
userId category popular; movieId category codes; rating label; timestamp time seconds; title drop unique;
genres list bars; gender category letters; age number|category ages; occupation category few; zip category text

criteo
label label; I1 number counts; I2 number counts; I3 number counts; I4 number counts; I5 number counts;
C1 category text; C2 category text; C3 category text

criteo, coded
label label; I1 number counts; I2 number counts; I3 number counts; C1 category popular; C2 category codes;
C3 category flat; C4 category few; C5 category popular

avazu
id drop long; click label; hour time hours; C1 category far; banner_pos category few; site_id category text;
site_domain category text; app_category category text; device_ip category text; device_type category few;
device_conn_type category few; C14 category codes; C15 category far; C16 category far; C17 category codes;
C18 category few; C19 category far; C20 category far; C21 category codes

ali_ccp
click label; purchase leak rare; 101 category flat; 121 category few; 122 category few; 124 category few;
125 category few; 126 category few; 205 category codes; 206 category codes; 207 category codes; 210 category popular;
301 category few; 508 category codes; 853 category codes; D109_14 number fractions; D110_14 number fractions;
D127_14 number fractions; D150_14 number fractions

taobao_ads
user category flat; time_stamp time seconds; adgroup_id category codes; pid category text; nonclk leak flag;
clk label; cate_id category codes; campaign_id category codes; customer category codes; brand category codes;
price number fractions; cms_segid category few; cms_group_id category few; final_gender_code category few;
age_level category few; pvalue_level category few; shopping_level category few; occupation category|number flag;
new_user_class_level category few

taobao_behaviour
userid category flat; itemid category codes; categoryid category codes; behavior category letters; ts time seconds

chinese
用户ID category flat; 商品ID category codes; 品牌 category text; 类目ID category codes; 价格 number fractions;
时间戳 time seconds; 性别 category few; 年龄 number ages; 城市 category few; 数量 number counts; 点击 label

kuairand
user_id category flat; video_id category codes; date time dates; hourmin number|time|category clock;
time_ms time millis; is_click label; is_like leak rare; is_follow leak rare; is_comment leak rare;
is_forward leak rare; long_view leak flag; play_time_ms leak counts; duration_ms number large; tab category few;
follow_user_num number counts; fans_user_num number counts; follow_user_num_range category text;
register_days number large; register_days_range category text; user_active_degree category|number few;
onehot_feat0 category few; onehot_feat1 category few; onehot_feat2 category few; onehot_feat3 category popular

retailrocket
timestamp time millis; visitorid category flat; event label|category letters; itemid category codes;
transactionid category|leak|drop sparse

yelp
user_id category text; business_id category text; stars label; useful number counts; funny number counts;
date time iso; text drop unique; city category text; latitude number negative; review_count number counts;
is_open category|number flag; postal_code category text

book_crossing
User-ID category flat; ISBN category text; Book-Rating label; Location category|list text; Age number ages;
Year-Of-Publication number|category years; Publisher category text; Image-URL-S drop urls

lastfm
userID category flat; artistID category codes; weight label|number counts; tagID category codes;
day category month_days; month category months; year number|category years

outbrain
display_id category flat; ad_id category codes; clicked label; document_id category codes; topic_id category few;
confidence_level number|category fractions; platform category few; geo_location category text;
traffic_source category few; publisher_id category codes; advertiser_id category codes; campaign_id category codes

amazon
reviewerID category text; asin category text; overall label; unixReviewTime time seconds; reviewTime time american;
verified category bools; vote number counts; summary drop unique; price number money; brand category text

tmall
user_id category flat; age_range category few; gender category few; merchant_id category codes; label label;
item_id category codes; cat_id category codes; seller_id category codes; brand_id category codes;
action_type category few

diginetica
sessionId category flat; userId category flat; itemId category codes; eventdate time days; queryId category codes

expedia
date_time time iso; site_name category few; posa_continent category few; user_location_country category few;
user_location_region category codes; user_location_city category codes; orig_destination_distance number fractions;
user_id category flat; is_mobile category|number flag; is_package category|number flag; channel category few;
srch_ci time days; srch_adults_cnt number small; srch_children_cnt number small; srch_rm_cnt number small;
srch_destination_id category codes; srch_destination_type_id category few; is_booking label; cnt number small;
hotel_continent category few; hotel_country category few; hotel_market category codes; hotel_cluster category few

talkingdata
ip category codes; app category popular; device category popular; os category popular; channel category codes;
click_time time iso; is_attributed label

kddcup
Click label; AdID category codes; AdvertiserID category codes; Depth number small; Position category few;
QueryID category flat; KeywordID category flat; TitleID category flat; UserID category flat

kkbox
msno category text; song_id category text; source_system_tab category text; source_type category text; target label;
city category few; bd number ages; gender category letters; registered_via category|number few;
registration_init_time time dates; song_length number large; language category few; artist_name category text

fashion
t_dat time days; customer_id category text; article_id category far; price number fractions;
sales_channel_id category few; product_type_no category codes; garment_group_name category text;
postal_code category text; age number ages; department_no category codes; section_no category few;
club_member_status category text

instacart
order_id category flat; user_id category flat; order_number number small; order_dow category weekdays;
order_hour_of_day category day_hours; days_since_prior_order number counts; product_id category codes;
aisle_id category few; department_id category few; reordered label

tenrec
user_id category flat; item_id category codes; click label; follow leak rare; like leak rare; share leak rare;
video_category category few; gender category few; age category|number few; hist_1 category codes;
hist_2 category codes; hist_3 category codes; hist_4 category codes

recipes
user category flat; recipe category codes; minutes number counts; tags list brackets; n_steps number small;
ingredients list brackets; submitted time days; n_ingredients number small; contributor_id category codes;
rating label

census
age number ages; workclass category text; fnlwgt number large; education category text;
education-num number|category small; marital-status category text; race category letters; sex category letters;
capital-gain number counts; hours-per-week number hours_worked; native-country category text; income label

bank
age number ages; job category text; marital category letters; balance number negative; housing category letters;
day category month_days; month category text; duration number large; campaign number|category small;
pdays number negative; previous number|category small; y label

attribution
timestamp number|time large; uid category flat; campaign category codes; conversion label; cost number fractions;
cpo number fractions; click leak flag; click_pos number|category small; click_nb number small; cat1 category codes;
cat2 category codes; cat3 category codes; cat4 category codes; conversion_id category|drop sparse
"""
MEASURED = """
weather
station category text; date time days; temp_max number negative; temp_min number negative; humidity number percents;
pressure number pressures; wind_speed number counts; rain_mm number fractions; cloud_cover number percents;
month category months

flights
year number|category years; month category months; day category month_days; dep_time number clock;
sched_dep_time number clock; dep_delay number negative; carrier category text; flight category codes;
tailnum category text; origin category letters; dest category text; air_time number large; distance number large;
hour category day_hours; minute number minutes

planes
tailnum category text; year number|category years; manufacturer category text; model category text;
engines number small; seats number codes; speed number pressures; engine category letters

salaries
work_year number|category years; experience_level category letters; job_title category text; salary number rounded;
salary_in_usd number rounded; remote_ratio number rounded; company_size category|number letters;
employee_residence category text

bikes
dteday time days; season category few; yr number|category flag; mnth number|category months;
hr number|category day_hours; holiday category|number flag; weekday category weekdays; temp number fractions;
hum number fractions; casual number counts; registered number|time counts; cnt number counts

penguins
species category letters; island category letters; bill_length_mm number fractions;
flipper_length_mm number pressures; body_mass_g number rounded; sex category letters

houses
price number rounded; bedrooms number small; bathrooms number fractions; sqft_living number large;
floors number small; waterfront category|number flag; condition number|category small; yr_built number|category years;
zipcode category far; lat number fractions; long number negative

cars
mpg number fractions; cylinders number small; displacement number large; horsepower number pressures;
weight number large; acceleration number fractions; model_year number|category small; origin category few

patients
pregnancies number small; glucose number pressures; blood_pressure number percents; skin_thickness number percents;
insulin number large; bmi number fractions; age number ages; heart_rate number pressures; steps number large

sensors
sensor_id category few; timestamp time seconds; voltage number fractions; current number fractions; rpm number large;
vibration number fractions; battery number percents; error_count number counts

stocks
date time days; open number fractions; close number fractions; volume number large; symbol category text;
trades number large

people
employee_id category flat; department category text; years_at_company number small; monthly_hours number pressures;
satisfaction number fractions; salary number rounded; num_projects number small; promotions number small
"""
ID_NAMES = """
userid itemid movieid adid uid iid mid pid sid aid vid cid userId movieId itemID UserID user item movie video
song artist customer query session channel author creative album app_id publisher_id sku asin isbn poi venueid
reviewerID memberid goods_id shopid cat cate cate_id brandid geo_hash query_id qid docid vertical productid
"""


@dataclass(frozen=True)
class Values:
    """Cells of a column, as text."""

    draw: np.random.Generator

    def text(self) -> list[str]:
        return [f"{n * 2654435761 % 2**32:08x}" for n in self._popular(200)]

    def letters(self) -> list[str]:
        return [("red", "blue", "green")[n] for n in self.draw.integers(0, 3, ROWS)]

    def bools(self) -> list[str]:
        return [("True", "False")[n] for n in self.draw.integers(0, 2, ROWS)]

    def unique(self) -> list[str]:
        return [f"It was the {n}th of them, in {n % 97} parts" for n in self.draw.permutation(ROWS)]

    def urls(self) -> list[str]:
        return [f"http://images.example.com/{n}.jpg" for n in self.draw.permutation(ROWS)]

    def bars(self) -> list[str]:
        return ["|".join(f"g{n}" for n in self.draw.integers(0, 18, 1 + row % 4)) for row in range(ROWS)]

    def brackets(self) -> list[str]:
        return [f"{[f't{n}' for n in self.draw.integers(0, 40, 1 + row % 4)]}" for row in range(ROWS)]

    def _popular(self, most: int) -> list[int]:
        return np.minimum(self.draw.zipf(1.4, ROWS), most).tolist()

    def popular(self) -> list[int]:
        return self._popular(500)

    def codes(self) -> list[int]:
        """Codes with gaps, some of them far more frequent than others, in no order."""
        codes = self.draw.permutation(40_000)[:400] + 1
        return codes[np.minimum(self.draw.zipf(1.3, ROWS), 400) - 1].tolist()

    def flat(self) -> list[int]:
        return self.draw.integers(1, 800, ROWS).tolist()

    def far(self) -> list[int]:
        return (self.draw.permutation(np.arange(100_000, 100_900))[self.draw.integers(0, 60, ROWS)]).tolist()

    def long(self) -> list[int]:
        return (self.draw.permutation(10 * ROWS)[:ROWS] + 10**18).tolist()

    def few(self) -> list[int]:
        return self.draw.choice(9, ROWS, p=self.draw.dirichlet(np.ones(9))).tolist()

    def sparse(self) -> list[str]:
        return [f"{n}" if n < 17_000 and n % 50 == 0 else "" for n in self.draw.integers(0, 20_000, ROWS)]

    def flag(self) -> list[int]:
        return (self.draw.random(ROWS) < 0.6).astype(int).tolist()

    def rare(self) -> list[int]:
        return (self.draw.random(ROWS) < 0.02).astype(int).tolist()

    def counts(self) -> list[int]:
        return (self.draw.pareto(1.0, ROWS) * 3).astype(int).tolist()

    def small(self) -> list[int]:
        return (1 + self.draw.poisson(2.0, ROWS)).tolist()

    def large(self) -> list[int]:
        return self.draw.gamma(2, 800, ROWS).astype(int).tolist()

    def rounded(self) -> list[int]:
        return (100 * self.draw.gamma(4, 12, ROWS).astype(int) + 2700).tolist()

    def negative(self) -> list[int]:
        return self.draw.normal(5, 20, ROWS).round().astype(int).tolist()

    def pressures(self) -> list[int]:
        return self.draw.normal(200, 14, ROWS).round().astype(int).tolist()

    def percents(self) -> list[int]:
        return np.clip(self.draw.normal(60, 20, ROWS), 0, 100).round().astype(int).tolist()

    def hours_worked(self) -> list[int]:
        return np.clip(self.draw.normal(40, 10, ROWS), 1, 99).round().astype(int).tolist()

    def ages(self) -> list[int]:
        return np.clip(self.draw.normal(36, 12, ROWS), 7, 90).astype(int).tolist()

    def years(self) -> list[int]:
        return self.draw.integers(1985, 2020, ROWS).tolist()

    def months(self) -> list[int]:
        return self.draw.integers(1, 13, ROWS).tolist()

    def month_days(self) -> list[int]:
        return self.draw.integers(1, 32, ROWS).tolist()

    def weekdays(self) -> list[int]:
        return self.draw.integers(0, 7, ROWS).tolist()

    def day_hours(self) -> list[int]:
        return self.draw.integers(0, 24, ROWS).tolist()

    def minutes(self) -> list[int]:
        return self.draw.integers(0, 60, ROWS).tolist()

    def clock(self) -> list[int]:
        return (self.draw.integers(5, 24, ROWS) * 100 + self.draw.integers(0, 60, ROWS)).tolist()

    def fractions(self) -> list[str]:
        return [f"{n:.4g}" for n in self.draw.gamma(2, 10, ROWS)]

    def money(self) -> list[str]:
        return [f"${n:.2f}" for n in self.draw.gamma(2, 10, ROWS)]

    def seconds(self) -> list[int]:
        return np.sort(1_500_000_000 + self.draw.integers(0, 10**7, ROWS)).tolist()

    def millis(self) -> list[int]:
        return [1000 * each + 7 for each in self.seconds()]

    def _days(self) -> np.ndarray:
        return np.array(self.seconds(), "datetime64[s]")

    def iso(self) -> list[str]:
        return [str(each).replace("T", " ") for each in self._days()]

    def days(self) -> list[str]:
        return [str(each)[:10] for each in self._days()]

    def american(self) -> list[str]:
        return [f"{str(each)[5:7]} {int(str(each)[8:10])}, {str(each)[:4]}" for each in self._days()]

    def dates(self) -> list[str]:
        return [each.replace("-", "") for each in self.days()]

    def hours(self) -> list[str]:
        return [str(each)[2:13].replace("-", "").replace("T", "") for each in self._days()]


@dataclass(frozen=True)
class Judged:
    table: str
    name: str
    wanted: list[str]
    judgement: Judgement

    @property
    def is_right(self) -> bool:
        return self.judgement.kind in self.wanted


def judged(text: str, seed: int) -> Iterator[Judged]:
    """Judge each column of each table but the label."""
    values = Values(np.random.default_rng(seed))
    for paragraph in text.strip().split("\n\n"):
        title, _, columns = paragraph.partition("\n")
        words = [each.split() for each in columns.replace("\n", " ").split(";")]
        own = [(name, kinds.split("|"), *rest) for name, kinds, *rest in words if "label" not in kinds.split("|")]
        cells = {name: [str(each) or None for each in getattr(values, how)()] for name, _, how in own}
        table = pa.table({name: pa.array(each, pa.string()) for name, each in cells.items()})
        found = survey(table.schema, iter(table.to_batches()))
        for (name, kinds, _), judgement in zip(own, judge([facts_of(each) for each in found.values()]), strict=True):
            yield Judged(title, name, kinds, judgement)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("text", [TABLES, MEASURED], ids=["clicks", "measurements"])
def test_columns_of_public_layouts(text, seed):
    found = list(judged(text, seed))
    wrong = [f"{each.table} {each.name}: {each.judgement}" for each in found if not each.is_right]
    assert len(wrong) <= 0.03 * len(found), "\n".join(wrong)
    sure = [each for each in found if each.judgement.sure == "sure"]
    assert len(sure) > len(found) / 2
    assert sum(not each.is_right for each in sure) <= 0.01 * len(sure), "\n".join(wrong)


@pytest.mark.parametrize("how", ["popular", "codes", "flat", "far", "few", "counts", "large"])
def test_no_usual_name_of_ids_is_a_number(how):
    columns = "; ".join(f"{name} category {how}" for name in ID_NAMES.split())
    assert [each.name for each in judged(f"ids\n{columns}", 0) if each.judgement.kind != "category"] == []
