"""Columns of public data sets: names, and how values are written, as their pages describe them; and the kinds wanted.

Written down before anything was tried on them. A column's kinds are those that a person who knows the data would give
it; `|` is between kinds that are both right. `label` is the column that the user names, or that is found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tests.unit.commands.data.layouts.values import Values

#: A column: its kinds, and its cells.
Column = tuple[str, list[Any]]
Layout = dict[str, Column]


def steam(v: Values) -> Layout:
    kinds = ["Action", "Indie", "Casual", "Adventure", "Strategy", "Simulation", "RPG", "Early Access", "Free to Play"]
    tags = [v.word(n) for n in range(60)]
    return {
        "appid": ("category|drop", v.unique(10, 1_069_460)),
        "name": ("drop|category", v.titles(0)),
        "release_date": ("time", v.times("%Y-%m-%d")),
        "english": ("category|number", v.flag(0.98)),
        "developer": ("category|drop", v.names(1100)),
        "publisher": ("category|drop", v.names(900)),
        "platforms": ("list|category", v.some(["windows", "windows;mac;linux", "windows;mac", "windows;linux"])),
        "required_age": ("number|category", v.some([0, 18, 16, 12, 7, 3], [95, 2, 1, 1, 0.5, 0.5])),
        "categories": ("list", v.lists(["Single-player", "Multi-player", "Steam Cloud", "Co-op", "Online"], ";")),
        "genres": ("list", v.lists(kinds, ";")),
        "steamspy_tags": ("list", v.lists(tags, ";", 3)),
        "achievements": ("number", v.count(45)),
        "positive_ratings": ("label", v.heavy(60, 2.5)),
        "negative_ratings": ("number|leak", v.heavy(20, 2.3)),
        "average_playtime": ("number|leak", v.count(150)),
        "median_playtime": ("number|leak", v.count(140)),
        "owners": ("category", v.some(["0-20000", "20000-50000", "50000-100000", "100000-200000", "200000-500000"])),
        "price": ("number", v.some([0.0, 3.99, 5.99, 6.99, 10.99, 0.79, 15.49], [1, 3, 2, 2, 1, 1, 1])),
    }


def goodbooks(v: Values) -> Layout:
    stars = {f"ratings_{n}": ("number|leak", v.heavy(400 * n, 1.2)) for n in range(1, 6)}
    return {
        "book_id": ("drop|category", v.rows()),
        "goodreads_book_id": ("category|drop", v.unique(1, 33_288_638)),
        "best_book_id": ("category|drop", v.unique(1, 35_534_230)),
        "work_id": ("category|drop", v.unique(87, 56_399_597)),
        "books_count": ("number", v.count(75, 1)),
        "isbn": ("category|drop", [f"{each:010}" for each in v.unique(2_000_000, 999_999_999)]),
        "isbn13": ("category|drop", v.missing([f"978{each}.0" for each in v.unique(10**9, 10**9 + 10**8)], 0.05)),
        "authors": ("list|category|drop", v.lists([v.word(n) + " " + v.word(3 * n) for n in range(700)], ", ", 2)),
        "original_publication_year": ("number|category", v.floats(v.missing(v.around(1995, 20, 1800, 2017), 0.002))),
        "original_title": ("drop|category", v.titles(0)),
        "language_code": ("category", v.missing(v.some(["eng", "en-US", "en-GB", "ara", "fre", "ind"]), 0.1)),
        "average_rating": ("label", [f"{n / 100:.2f}" for n in v.around(400, 25, 247, 482)]),
        "ratings_count": ("number|leak", v.heavy(21_000, 1.1)),
        "work_text_reviews_count": ("number|leak", v.heavy(1400, 1.0)),
        **stars,
        "image_url": ("drop", [f"https://images.example.com/books/{n}m/{n}.jpg" for n in v.unique(1, 10**9)]),
    }


def fashion_articles(v: Values) -> Layout:
    return {
        "t_dat": ("time", v.times("%Y-%m-%d", "2018-09-20", 730, sort=True)),
        "customer_id": ("category", v.hexes(900, 64)),
        "price": ("label", v.heavy(0.025, 0.5, 10)),
        "sales_channel_id": ("category", v.codes(2, 1)),
        "article_id": ("category", [f"0{each}" for each in v.ids(1500, 108_775_015, 959_461_001)]),
        "product_code": ("category", [f"0{each}" for each in v.ids(900, 108_775, 959_461)]),
        "prod_name": ("category", v.titles(700, 1, 3)),
        "product_type_no": ("category", v.ids(60, 49, 762)),
        "product_type_name": ("category", v.words(60)),
        "product_group_name": ("category", v.some(["Garment Upper body", "Shoes", "Socks & Tights", "Swimwear"])),
        "graphical_appearance_no": ("category", v.ids(28, 1_010_001, 1_010_029)),
        "colour_group_code": ("category", [f"{each:02}" for each in v.ids(50, 1, 94)]),
        "colour_group_name": ("category", v.some(["Black", "White", "Light Beige", "Dark Blue", "Blue"])),
        "perceived_colour_value_id": ("category", v.codes(7, 1)),
        "department_no": ("category", v.ids(240, 1201, 9989)),
        "department_name": ("category", v.titles(200, 1, 3)),
        "index_code": ("category", v.some(list("ABCDFGHIJS"))),
        "index_group_no": ("category", v.some([1, 2, 3, 4, 26])),
        "section_no": ("category", v.ids(50, 2, 97)),
        "garment_group_no": ("category", v.ids(21, 1001, 1025)),
        "detail_desc": ("category|drop", v.titles(1200, 12, 30)),
        "FN": ("category|constant|number", v.missing(["1.0"] * 2000, 0.65)),
        "club_member_status": ("category", v.some(["ACTIVE", "PRE-CREATE", "LEFT CLUB"], [90, 9, 1])),
        "fashion_news_frequency": ("category", v.some(["NONE", "Regularly", "Monthly"], [60, 38, 2])),
        "age": ("number", v.floats(v.missing(v.around(36, 14, 16, 99), 0.01))),
    }


def expedia_hotels(v: Values) -> Layout:
    rivals = {
        f"comp{n}_{name}": ("number|category", v.missing(v.some(values), 0.6, "NULL"))
        for n in range(1, 4)
        for name, values in {"rate": [-1, 0, 1], "inv": [0, 0, 1, -1], "rate_percent_diff": range(2, 90)}.items()
    }
    return {
        "srch_id": ("category", v.ids(400, 1, 665_574)),
        "date_time": ("time", v.times("%Y-%m-%d %H:%M:%S", "2012-11-01", 240)),
        "site_id": ("category", v.codes(34, 1)),
        "visitor_location_country_id": ("category", v.ids(80, 1, 231)),
        "visitor_hist_starrating": ("number", v.missing(v.fraction(1.4, 5, 2), 0.9, "NULL")),
        "prop_country_id": ("category", v.ids(90, 1, 230)),
        "prop_id": ("category", v.ids(1400, 1, 140_821)),
        "prop_starrating": ("number|category", v.some([0, 1, 2, 3, 4, 5], [2, 1, 20, 40, 30, 7])),
        "prop_review_score": ("number", v.some(["0.0", "2.5", "3.0", "3.5", "4.0", "4.5", "5.0"])),
        "prop_brand_bool": ("category|number", v.flag(0.6)),
        "prop_location_score1": ("number", v.fraction(0, 6.98, 2)),
        "prop_log_historical_price": ("number", v.fraction(0, 6.2, 2)),
        "position": ("category|number", v.around(16, 10, 1, 40)),
        "price_usd": ("number", v.heavy(130, 0.7, 2)),
        "promotion_flag": ("category|number", v.flag(0.2)),
        "srch_destination_id": ("category", v.ids(500, 2, 28_416)),
        "srch_length_of_stay": ("number", v.count(1.4, 1)),
        "srch_booking_window": ("number", v.count(37)),
        "srch_adults_count": ("number", v.some([2, 1, 4, 3], [60, 25, 8, 7])),
        "srch_children_count": ("number", v.count(0.3)),
        "srch_room_count": ("number", v.some([1, 2, 3], [90, 8, 2])),
        "srch_saturday_night_bool": ("category|number", v.flag(0.5)),
        "orig_destination_distance": ("number", v.missing(v.heavy(800, 1.2, 2), 0.3, "NULL")),
        "random_bool": ("category|number", v.flag(0.3)),
        **rivals,
        "click_bool": ("label", clicks := v.flag(0.1)),
        "gross_bookings_usd": (
            "leak",
            [each if n else "NULL" for n, each in zip(clicks, v.heavy(280, 0.8, 2), strict=True)],
        ),
        "booking_bool": ("leak", [int(n and draw) for n, draw in zip(clicks, v.flag(0.6), strict=True)]),
    }


def airbnb(v: Values) -> Layout:
    return {
        "id": ("drop|category", v.unique(2539, 36_487_245)),
        "name": ("drop|category", v.titles(0, 3, 8)),
        "host_id": ("category", v.ids(1400, 2438, 274_321_313)),
        "host_name": ("category", v.words(500)),
        "neighbourhood_group": ("category", v.some(["Manhattan", "Brooklyn", "Queens", "Bronx", "Staten Island"])),
        "neighbourhood": ("category", v.words(180)),
        "latitude": ("number", v.fraction(40.49979, 40.91306, 5)),
        "longitude": ("number", v.fraction(-74.24442, -73.71299, 5)),
        "room_type": ("category", v.some(["Entire home/apt", "Private room", "Shared room"], [52, 45, 3])),
        "price": ("label", v.heavy(105, 0.7)),
        "minimum_nights": ("number", v.count(6, 1)),
        "number_of_reviews": ("number", v.count(23)),
        "last_review": ("time", v.missing(v.times("%Y-%m-%d", "2017-01-01", 900), 0.2)),
        "reviews_per_month": ("number", v.missing(v.heavy(0.7, 1.2, 2), 0.2)),
        "calculated_host_listings_count": ("number", v.count(3, 1)),
        "availability_365": ("number", v.missing(v.around(110, 130, 0, 365), 0.0)),
    }


def santander(v: Values) -> Layout:
    products = {
        f"ind_{name}_ult1": ("category|number|leak", v.flag(share))
        for name, share in {
            "cco_fin": 0.65,
            "cder_fin": 0.002,
            "nomina": 0.05,
            "tjcr_fin": 0.04,
            "reca_fin": 0.05,
        }.items()
    }
    return {
        "fecha_dato": ("time", v.times("%Y-%m-28", "2015-01-28", 500, sort=True)),
        "ncodpers": ("category", v.ids(900, 15_889, 1_553_689)),
        "ind_empleado": ("category", v.some(["N", "B", "F", "A", "S"], [95, 2, 2, 1, 0.2])),
        "pais_residencia": ("category", v.some(["ES", "FR", "AR", "DE", "GB", "US"], [95, 1, 1, 1, 1, 1])),
        "sexo": ("category", v.some(["H", "V"])),
        "age": ("number", [f"{n:3}" for n in v.around(40, 17, 2, 110)]),
        "fecha_alta": ("time", v.times("%Y-%m-%d", "1995-01-16", 7500)),
        "ind_nuevo": ("category|number", v.flag(0.06)),
        "antiguedad": ("number", [f"{n:7}" for n in v.around(77, 66, 0, 256)]),
        "indrel_1mes": ("category|number", v.some(["1.0", "1", "3.0", "2.0"], [60, 38, 1, 1])),
        "tiprel_1mes": ("category", v.some(["I", "A", "P", "R"], [54, 44, 1, 1])),
        "indresi": ("category", v.some(["S", "N"], [99, 1])),
        "canal_entrada": ("category", v.some(["KHE", "KAT", "KFC", "KHQ", "KFA", "004", "RED", "007"])),
        "indfall": ("category", v.some(["N", "S"], [99, 1])),
        "cod_prov": ("category", v.some(range(1, 53))),
        "nomprov": ("category", v.words(52)),
        "ind_actividad_cliente": ("category|number", v.flag(0.45)),
        "renta": ("number", v.missing(v.heavy(100_000, 0.6, 2), 0.2)),
        "segmento": ("category", v.some(["01 - TOP", "02 - PARTICULARES", "03 - UNIVERSITARIO"], [4, 60, 36])),
        **products,
        "ind_recibo_ult1": ("label", v.flag(0.12)),
    }


def home_credit(v: Values) -> Layout:
    documents = {f"FLAG_DOCUMENT_{n}": ("category|number|constant", v.flag(0.7 / n**2)) for n in (3, 5, 6, 8)}
    return {
        "SK_ID_CURR": ("drop|category", v.rows(100_002)),
        "TARGET": ("label", v.flag(0.08)),
        "NAME_CONTRACT_TYPE": ("category", v.some(["Cash loans", "Revolving loans"], [9, 1])),
        "CODE_GENDER": ("category", v.some(["F", "M"])),
        "FLAG_OWN_CAR": ("category", v.flag(0.3, ("N", "Y"))),
        "FLAG_OWN_REALTY": ("category", v.flag(0.7, ("N", "Y"))),
        "CNT_CHILDREN": ("number", v.count(0.4)),
        "AMT_INCOME_TOTAL": ("number", [f"{4500 * n}.0" for n in v.around(36, 20, 6, 200)]),
        "AMT_CREDIT": ("number", v.heavy(500_000, 0.6, 1)),
        "AMT_ANNUITY": ("number", v.heavy(25_000, 0.5, 1)),
        "NAME_INCOME_TYPE": ("category", v.some(["Working", "State servant", "Commercial associate", "Pensioner"])),
        "NAME_HOUSING_TYPE": ("category", v.some(["House / apartment", "With parents", "Rented apartment"], [8, 1, 1])),
        "REGION_POPULATION_RELATIVE": ("number", v.some(["0.018801", "0.0035409", "0.010032", "0.031329", "0.02866"])),
        "DAYS_BIRTH": ("number", v.around(-16_000, 4300, -25_200, -7500)),
        "DAYS_EMPLOYED": ("number", v.some([*range(-9000, -100, 7), *[365_243] * 200])),
        "DAYS_REGISTRATION": ("number", v.floats(v.around(-5000, 3500, -24_000, 0))),
        "OWN_CAR_AGE": ("number", v.missing(v.floats(v.count(12)), 0.66)),
        "FLAG_EMP_PHONE": ("category|number", v.flag(0.8)),
        "OCCUPATION_TYPE": ("category", v.missing(v.some(["Laborers", "Core staff", "Managers", "Drivers"]), 0.3)),
        "CNT_FAM_MEMBERS": ("number", v.floats(v.count(1.1, 1))),
        "REGION_RATING_CLIENT": ("category|number", v.some([2, 3, 1], [74, 16, 10])),
        "WEEKDAY_APPR_PROCESS_START": ("category", v.some(["MONDAY", "TUESDAY", "FRIDAY", "SUNDAY"])),
        "HOUR_APPR_PROCESS_START": ("category|number", v.around(12, 3, 0, 23)),
        "REG_CITY_NOT_LIVE_CITY": ("category|number", v.flag(0.08)),
        "ORGANIZATION_TYPE": ("category", v.some(["Business Entity Type 3", "School", "XNA", "Trade: type 7"])),
        "EXT_SOURCE_2": ("number", v.fraction(0, 0.85, 9)),
        "EXT_SOURCE_3": ("number", v.missing(v.fraction(0, 0.89, 9), 0.2)),
        "OBS_30_CNT_SOCIAL_CIRCLE": ("number", v.floats(v.count(1.4))),
        "DAYS_LAST_PHONE_CHANGE": ("number", v.floats(v.around(-960, 800, -4200, 0))),
        **documents,
        "AMT_REQ_CREDIT_BUREAU_YEAR": ("number", v.missing(v.floats(v.count(1.9)), 0.13)),
    }


def taxi(v: Values) -> Layout:
    fare, tip = v.around(12, 6, 3, 80), v.some([0, 1.0, 1.45, 2.36, 3.0], [40, 20, 15, 15, 10])
    extra, tolls = v.some([0, 0.5, 1], [5, 3, 2]), v.some([0, 5.76], [94, 6])
    parts = zip(fare, tip, extra, tolls, strict=True)
    return {
        "VendorID": ("category", v.some([1, 2])),
        "tpep_pickup_datetime": ("time", v.times("%Y-%m-%d %H:%M:%S", "2019-01-01", 31)),
        "tpep_dropoff_datetime": ("time|leak", v.times("%Y-%m-%d %H:%M:%S", "2019-01-01", 31)),
        "passenger_count": ("number|category", v.some([1, 2, 5, 3, 6, 4, 0], [70, 15, 5, 4, 3, 2, 1])),
        "trip_distance": ("number", v.heavy(1.8, 0.8, 2)),
        "RatecodeID": ("category", v.some([1, 2, 5, 3, 4, 99], [97, 2, 0.5, 0.3, 0.1, 0.1])),
        "store_and_fwd_flag": ("category", v.some(["N", "Y"], [99, 1])),
        "PULocationID": ("category", v.ids(200, 1, 266)),
        "DOLocationID": ("category", v.ids(230, 1, 266)),
        "payment_type": ("category", v.some([1, 2, 3, 4], [70, 28, 1, 1])),
        "fare_amount": ("leak", fare),
        "extra": ("leak", extra),
        "mta_tax": ("leak|constant", [0.5] * 2000),
        "tip_amount": ("leak", tip),
        "tolls_amount": ("leak", tolls),
        "improvement_surcharge": ("leak|constant", [0.3] * 2000),
        "total_amount": ("label", [f"{sum(each) + 0.8:.2f}" for each in parts]),
    }


def telco(v: Values) -> Layout:
    services = ["MultipleLines", "OnlineSecurity", "OnlineBackup", "TechSupport", "StreamingTV"]
    return {
        "customerID": ("drop|category", [f"{n:04}-{v.word(n).upper():.5}" for n in v.unique(1000, 9999)]),
        "gender": ("category", v.some(["Male", "Female"])),
        "SeniorCitizen": ("category|number", v.flag(0.16)),
        "Partner": ("category", v.flag(0.48, ("No", "Yes"))),
        "tenure": ("number", v.around(32, 25, 0, 72)),
        **{name: ("category", v.some(["No", "Yes", "No internet service"])) for name in services},
        "InternetService": ("category", v.some(["DSL", "Fiber optic", "No"])),
        "Contract": ("category", v.some(["Month-to-month", "One year", "Two year"])),
        "PaperlessBilling": ("category", v.flag(0.6, ("No", "Yes"))),
        "PaymentMethod": ("category", v.some(["Electronic check", "Mailed check", "Bank transfer (automatic)"])),
        "MonthlyCharges": ("number", v.fraction(18.25, 118.75, 2)),
        "TotalCharges": ("number", v.missing(v.heavy(1400, 1.0, 2), 0.0016, " ")),
        "Churn": ("label", v.flag(0.27, ("No", "Yes"))),
    }


def online_retail(v: Values) -> Layout:
    stock = [
        f"{n}{letter}" for n, letter in zip(v.ids(900, 10_002, 90_208), v.some(["", "", "", "A", "B"]), strict=True)
    ]
    return {
        "InvoiceNo": ("category", [f"{'C' * (n % 50 == 0)}{n}" for n in v.ids(400, 536_365, 581_587)]),
        "StockCode": ("category", stock),
        "Description": ("category|drop", [each.upper() for each in v.titles(900)]),
        "Quantity": ("label", v.heavy(4, 1.2)),
        "InvoiceDate": ("time", v.times("%-m/%-d/%Y %-H:%M", "2010-12-01", 370, sort=True)),
        "UnitPrice": ("number", v.heavy(2.1, 0.9, 2)),
        "CustomerID": ("category", v.floats(v.missing(v.ids(700, 12_346, 18_288), 0.25))),
        "Country": ("category", v.some(["United Kingdom", "Germany", "France", "EIRE", "Spain"], [90, 3, 3, 2, 2])),
    }


def spotify(v: Values) -> Layout:
    sounds = ["danceability", "energy", "speechiness", "acousticness", "instrumentalness", "liveness", "valence"]
    return {
        "": ("drop", v.rows(0)),
        "track_id": ("category|drop", v.hexes(1900, 22)),
        "artists": ("list|category", v.lists([f"{v.word(n)} {v.word(5 * n)}" for n in range(300)], ";", 3)),
        "album_name": ("category|drop", v.titles(1200)),
        "track_name": ("category|drop", v.titles(1600)),
        "popularity": ("label", v.around(33, 22, 0, 100)),
        "duration_ms": ("number", v.heavy(220_000, 0.4)),
        "explicit": ("category", v.flag(0.1, ("False", "True"))),
        "key": ("category", v.codes(12)),
        "loudness": ("number", v.fraction(-49.5, 4.5, 3)),
        "mode": ("category", v.flag(0.6)),
        **{name: ("number", v.fraction(0, 1, 4)) for name in sounds},
        "tempo": ("number", v.fraction(60, 220, 3)),
        "time_signature": ("category|number", v.some([4, 3, 5, 1], [89, 8, 2, 1])),
        "track_genre": ("category", v.some(["acoustic", "hip-hop", "j-pop", "drum-and-bass", "r-n-b", "k-pop"])),
    }


def zillow(v: Values) -> Layout:
    homes, land = v.heavy(170_000, 0.7), v.heavy(250_000, 0.9)
    return {
        "parcelid": ("category|drop", v.unique(10_711_738, 169_601_949)),
        "logerror": ("label", v.fraction(-0.4, 0.5, 4)),
        "transactiondate": ("time", v.times("%Y-%m-%d", "2016-01-01", 365, sort=True)),
        "airconditioningtypeid": ("category", v.missing(v.some(["1.0", "13.0", "5.0", "11.0"], [90, 8, 1, 1]), 0.7)),
        "bathroomcnt": ("number", v.some(["2.0", "3.0", "1.0", "2.5", "4.0"])),
        "bedroomcnt": ("number", v.floats(v.around(3, 1, 0, 9))),
        "buildingqualitytypeid": ("category", v.missing(v.some(["7.0", "4.0", "1.0", "10.0", "12.0"]), 0.35)),
        "calculatedfinishedsquarefeet": ("number", v.floats(v.heavy(1600, 0.5))),
        "fips": ("category", v.some(["6037.0", "6059.0", "6111.0"], [65, 27, 8])),
        "garagecarcnt": ("number", v.missing(v.some(["2.0", "1.0", "0.0", "3.0"], [80, 10, 5, 5]), 0.67)),
        "hashottuborspa": ("category|constant", v.missing(["True"] * 2000, 0.97)),
        "heatingorsystemtypeid": ("category", v.missing(v.some(["2.0", "7.0", "24.0", "6.0", "13.0"]), 0.37)),
        "latitude": ("number", v.floats(v.around(34_000_000, 260_000))),
        "longitude": ("number", v.floats(v.around(-118_200_000, 360_000))),
        "lotsizesquarefeet": ("number", v.missing(v.floats(v.heavy(7200, 0.8)), 0.1)),
        "propertycountylandusecode": ("category", v.some(["0100", "122", "010C", "0101", "34", "1111"])),
        "propertylandusetypeid": ("category", v.some(["261.0", "266.0", "246.0", "269.0"], [70, 20, 6, 4])),
        "propertyzoningdesc": ("category", v.missing([f"LA{each}1".upper() for each in v.words(300)], 0.34)),
        "regionidcity": ("category", v.floats(v.missing(v.ids(150, 3491, 396_557), 0.02))),
        "regionidcounty": ("category", v.some(["3101.0", "1286.0", "2061.0"], [65, 27, 8])),
        "regionidzip": ("category", v.floats(v.ids(300, 95_982, 97_344))),
        "unitcnt": ("number", v.missing(v.some(["1.0", "2.0", "4.0", "3.0"], [92, 5, 2, 1]), 0.35)),
        "yearbuilt": ("number|category", v.floats(v.around(1968, 24, 1885, 2015))),
        "structuretaxvaluedollarcnt": ("number", v.floats(homes)),
        "taxvaluedollarcnt": ("number", v.floats([sum(each) for each in zip(homes, land, strict=True)])),
        "assessmentyear": ("constant", ["2015.0"] * 2000),
        "landtaxvaluedollarcnt": ("number", v.floats(land)),
        "taxamount": ("number", v.heavy(4500, 0.8, 2)),
    }


FIRST: Mapping[str, tuple[str, Callable[[Values], Layout]]] = {
    "steam, games": ("positive_ratings", steam),
    "goodbooks-10k": ("average_rating", goodbooks),
    "H&M, transactions with articles": ("price", fashion_articles),
    "expedia, personalized sorts": ("click_bool", expedia_hotels),
    "airbnb, New York": ("price", airbnb),
    "santander products": ("ind_recibo_ult1", santander),
    "home credit": ("", home_credit),
    "taxis of New York": ("total_amount", taxi),
    "telco churn": ("", telco),
    "online retail": ("Quantity", online_retail),
    "spotify tracks": ("popularity", spotify),
    "zillow": ("logerror", zillow),
}
