"""As first.py: the other half."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tests.unit.commands.data.layouts.first import Layout
from tests.unit.commands.data.layouts.values import Values


def hotel_bookings(v: Values) -> Layout:
    months = ["January", "February", "March", "April", "May", "July", "August", "October", "December"]
    cancelled = v.flag(0.37)
    return {
        "hotel": ("category", v.some(["City Hotel", "Resort Hotel"])),
        "is_canceled": ("label", cancelled),
        "lead_time": ("number", v.count(104)),
        "arrival_date_year": ("number|category", v.some([2015, 2016, 2017])),
        "arrival_date_month": ("category", v.some(months)),
        "arrival_date_week_number": ("category|number", v.some(range(1, 54))),
        "arrival_date_day_of_month": ("category|number", v.some(range(1, 32))),
        "stays_in_weekend_nights": ("number", v.count(0.9)),
        "stays_in_week_nights": ("number", v.count(2.5)),
        "adults": ("number", v.some([2, 1, 3, 0, 4], [75, 19, 5, 0.4, 0.1])),
        "children": ("number", v.floats(v.count(0.1))),
        "babies": ("number", v.count(0.01)),
        "meal": ("category", v.some(["BB", "HB", "SC", "Undefined", "FB"])),
        "country": ("category", v.missing(v.some(["PRT", "GBR", "FRA", "ESP", "DEU", "ITA", "IRL"]), 0.004, "NULL")),
        "market_segment": ("category", v.some(["Online TA", "Offline TA/TO", "Groups", "Direct", "Corporate"])),
        "distribution_channel": ("category", v.some(["TA/TO", "Direct", "Corporate", "GDS"], [82, 12, 5, 1])),
        "is_repeated_guest": ("category|number", v.flag(0.03)),
        "previous_cancellations": ("number", v.count(0.09)),
        "previous_bookings_not_canceled": ("number", v.count(0.14)),
        "reserved_room_type": ("category", v.some(list("ADEFGBCH"))),
        "booking_changes": ("number", v.count(0.22)),
        "deposit_type": ("category", v.some(["No Deposit", "Non Refund", "Refundable"], [87, 12, 1])),
        "agent": ("category", v.missing(v.ids(160, 1, 535), 0.14, "NULL")),
        "company": ("category", v.missing(v.ids(120, 6, 543), 0.94, "NULL")),
        "days_in_waiting_list": ("number", v.count(2)),
        "customer_type": ("category", v.some(["Transient", "Contract", "Transient-Party", "Group"])),
        "adr": ("number", v.heavy(95, 0.5, 2)),
        "required_car_parking_spaces": ("number|category", v.flag(0.06)),
        "total_of_special_requests": ("number", v.count(0.57)),
        "reservation_status": ("category|leak", [("Check-Out", "Canceled")[n] for n in cancelled]),
        "reservation_status_date": ("time", v.times("%Y-%m-%d", "2014-10-17", 1000)),
    }


def credit_default(v: Values) -> Layout:
    late = [-1, 0, -2, 1, 2, 3, 4, 5, 8]
    return {
        "ID": ("drop|category", v.rows()),
        "LIMIT_BAL": ("number", [10_000 * n for n in v.around(17, 12, 1, 80)]),
        "SEX": ("category", v.codes(2, 1)),
        "EDUCATION": ("category", v.codes(7)),
        "MARRIAGE": ("category", v.codes(4)),
        "AGE": ("number", v.around(35, 9, 21, 79)),
        **{f"PAY_{n}": ("number|category", v.some(late)) for n in (0, 2, 3, 4, 5, 6)},
        **{f"BILL_AMT{n}": ("number", v.around(45_000, 60_000, -150_000, 900_000)) for n in range(1, 7)},
        **{f"PAY_AMT{n}": ("number", v.heavy(2500, 1.3)) for n in range(1, 7)},
        "default payment next month": ("label", v.flag(0.22)),
    }


def lending_club(v: Values) -> Layout:
    return {
        "id": ("drop|category", v.unique(54_734, 40_000_000)),
        "member_id": ("drop|category", v.unique(70_473, 42_000_000)),
        "loan_amnt": ("number", [25 * n for n in v.around(560, 330, 20, 1400)]),
        "term": ("category", v.some([" 36 months", " 60 months"], [7, 3])),
        "int_rate": ("number", [f"{each}%" for each in v.fraction(5.3, 28.9, 2)]),
        "installment": ("number", v.heavy(380, 0.5, 2)),
        "grade": ("category", v.some(list("BCADEFG"))),
        "sub_grade": ("category", v.some([f"{each}{n}" for each in "ABCDEFG" for n in range(1, 6)])),
        "emp_title": ("category|drop", v.missing(v.titles(1300, 1, 3), 0.06)),
        "emp_length": ("category", v.some(["10+ years", "< 1 year", "2 years", "3 years", "n/a", "1 year"])),
        "home_ownership": ("category", v.some(["MORTGAGE", "RENT", "OWN", "OTHER"], [50, 40, 9, 1])),
        "annual_inc": ("number", [f"{1000 * n}.0" for n in v.heavy(65, 0.5)]),
        "issue_d": ("time|category", v.times("%b-%Y", "2010-06-01", 1800)),
        "purpose": ("category", v.some(["debt_consolidation", "credit_card", "car", "house", "medical"])),
        "zip_code": ("category", [f"{n:03}xx" for n in v.ids(500, 1, 999)]),
        "addr_state": ("category", v.some(["CA", "NY", "TX", "FL", "NJ", "PA", "IL"])),
        "dti": ("number", v.fraction(0, 40, 2)),
        "delinq_2yrs": ("number", v.count(0.3)),
        "earliest_cr_line": ("time|category", v.times("%b-%Y", "1975-01-01", 13_000)),
        "inq_last_6mths": ("number", v.count(0.8)),
        "open_acc": ("number", v.around(11, 5, 1, 60)),
        "pub_rec": ("number", v.count(0.15)),
        "revol_bal": ("number", v.heavy(11_000, 0.9)),
        "revol_util": ("number", v.missing([f"{each}%" for each in v.fraction(0, 100, 1)], 0.001)),
        "total_acc": ("number", v.around(25, 11, 2, 120)),
        "loan_status": ("label", v.flag(0.8, ("Charged Off", "Fully Paid"))),
    }


def rossmann(v: Values) -> Layout:
    return {
        "Store": ("category", v.ids(1115, 1, 1116)),
        "DayOfWeek": ("category", v.some(range(1, 8))),
        "Date": ("time", v.times("%Y-%m-%d", "2013-01-01", 900)),
        "Sales": ("label", v.heavy(6300, 0.4)),
        "Customers": ("number|leak", v.heavy(640, 0.4)),
        "Open": ("category|number", v.flag(0.83)),
        "Promo": ("category|number", v.flag(0.38)),
        "StateHoliday": ("category", v.some(["0", "a", "b", "c"], [97, 2, 1, 0.5])),
        "SchoolHoliday": ("category|number", v.flag(0.18)),
        "StoreType": ("category", v.some(list("abcd"))),
        "Assortment": ("category", v.some(list("abc"))),
        "CompetitionDistance": ("number", [f"{10 * n}.0" for n in v.heavy(230, 1.1)]),
        "CompetitionOpenSinceMonth": ("category|number", v.floats(v.missing(v.some(range(1, 13)), 0.3))),
        "CompetitionOpenSinceYear": ("number|category", v.floats(v.missing(v.around(2009, 4, 1990, 2015), 0.3))),
        "Promo2": ("category|number", v.flag(0.5)),
        "PromoInterval": ("list|category", v.missing(v.some(["Jan,Apr,Jul,Oct", "Feb,May,Aug,Nov"]), 0.5)),
    }


def fraud(v: Values) -> Layout:
    return {
        "TransactionID": ("drop|category", v.rows(2_987_000)),
        "isFraud": ("label", v.flag(0.035)),
        "TransactionDT": ("number|time", sorted(v.unique(86_400, 15_811_131))),
        "TransactionAmt": ("number", v.heavy(69, 0.9, 2)),
        "ProductCD": ("category", v.some(list("WCRHS"))),
        "card1": ("category", v.ids(900, 1000, 18_397)),
        "card2": ("category", v.floats(v.missing(v.ids(300, 100, 601), 0.02))),
        "card3": ("category", v.some(["150.0", "185.0", "106.0", "146.0"], [88, 10, 1, 1])),
        "card4": ("category", v.some(["visa", "mastercard", "american express", "discover"])),
        "card5": ("category", v.floats(v.missing(v.ids(60, 100, 238), 0.01))),
        "card6": ("category", v.some(["debit", "credit"])),
        "addr1": ("category", v.floats(v.missing(v.ids(150, 100, 541), 0.1))),
        "addr2": ("category", v.missing(v.some(["87.0", "60.0", "96.0", "32.0"], [97, 1, 1, 1]), 0.1)),
        "dist1": ("number", v.missing(v.floats(v.heavy(20, 1.8)), 0.6)),
        "P_emaildomain": ("category", v.missing(v.some(["gmail.com", "yahoo.com", "hotmail.com", "aol.com"]), 0.16)),
        **{f"C{n}": ("number|category", v.floats(v.count(2, 1))) for n in (1, 2, 3, 5, 6, 13)},
        **{f"D{n}": ("number", v.missing(v.floats(v.count(90)), 0.3)) for n in (1, 2, 4, 10)},
        **{f"M{n}": ("category", v.missing(v.flag(0.6, ("F", "T")), 0.45)) for n in (1, 2, 3, 5)},
        **{f"V{n}": ("number|category", v.missing(v.some(["1.0", "0.0", "2.0"]), 0.4)) for n in (1, 4, 12, 35)},
        "V127": ("number", v.missing(v.heavy(110, 1.2, 6), 0.3)),
        "DeviceType": ("category", v.missing(v.some(["desktop", "mobile"]), 0.76)),
        "DeviceInfo": (
            "category",
            v.missing(v.some(["Windows", "iOS Device", "SM-G531H Build/LMY48B", "rv:57"]), 0.8),
        ),
    }


def safe_driver(v: Values) -> Layout:
    return {
        "id": ("drop|category", v.unique(7, 1_488_027)),
        "target": ("label", v.flag(0.036)),
        "ps_ind_01": ("number|category", v.count(1.9)),
        "ps_ind_02_cat": ("category", v.some([1, 2, 3, 4, -1], [72, 20, 5, 2, 0.1])),
        "ps_ind_03": ("number|category", v.around(4, 2.7, 0, 11)),
        "ps_ind_04_cat": ("category", v.some([0, 1, -1], [58, 42, 0.1])),
        "ps_ind_05_cat": ("category", v.some([0, 6, 4, 1, 3, 2, 5, -1])),
        "ps_ind_06_bin": ("category|number", v.flag(0.4)),
        "ps_ind_14": ("number|category", v.count(0.02)),
        "ps_ind_15": ("number|category", v.around(7, 3.5, 0, 13)),
        "ps_reg_01": ("number", v.some(["0.9", "0.8", "0.7", "0.4", "0.1", "0.6"])),
        "ps_reg_03": ("number", v.heavy(0.85, 0.4, 9)),
        "ps_car_01_cat": ("category", v.some([11, 7, 6, 10, 4, 9, 5, 8, 3, 0, 2, 1, -1])),
        "ps_car_11_cat": ("category", v.some(range(1, 105))),
        "ps_car_11": ("number|category", v.some([3, 2, 1, 0], [53, 25, 17, 5])),
        "ps_car_12": ("number", v.fraction(0.3, 0.6, 9)),
        "ps_car_15": ("number", v.some(["3.605551275", "3.4641016151", "3.3166247904", "0.0"])),
        "ps_calc_01": ("number", v.some([f"0.{n}" for n in range(10)])),
        "ps_calc_04": ("number|category", v.around(2, 1, 0, 5)),
        "ps_calc_10": ("number", v.around(8, 3, 0, 25)),
        "ps_calc_15_bin": ("category|number", v.flag(0.12)),
    }


def avito(v: Values) -> Layout:
    return {
        "ID": ("drop|category", v.rows()),
        "SearchID": ("category", v.ids(900, 2, 112_159_462)),
        "AdID": ("category", v.ids(700, 2, 37_287_398)),
        "Position": ("category|number", v.some([1, 7, 6, 2, 8])),
        "ObjectType": ("category|constant", v.some([3, 2, 1], [70, 20, 10])),
        "HistCTR": ("number", v.fraction(0.000001, 0.05, 6)),
        "IsClick": ("label", v.flag(0.03)),
        "SearchDate": ("time", v.times("%Y-%m-%d %H:%M:%S.0", "2015-04-25", 26)),
        "IPID": ("category", v.ids(800, 1, 2_000_000)),
        "UserID": ("category", v.ids(900, 1, 4_339_000)),
        "IsUserLoggedOn": ("category|number", v.flag(0.3)),
        "SearchQuery": ("category|drop", v.missing(v.titles(600, 1, 3), 0.6)),
        "LocationID": ("category", v.ids(200, 1, 4080)),
        "CategoryID": ("category", v.ids(50, 1, 500_001)),
        "Price": ("number", v.heavy(8000, 1.5, 1)),
        "Title": ("category|drop", v.titles(0, 2, 5)),
        "IsContext": ("category|constant", [1] * 2000),
    }


def trivago(v: Values) -> Layout:
    hotels, filters = (
        [f"{n}" for n in v.ids(900, 5001, 11_282_894)[:500]],
        ["Sort By Rating", "5 Star", "Hotel", "Motel"],
    )
    actions = ["interaction item image", "clickout item", "search for destination", "filter selection"]
    return {
        "user_id": ("category", [each.upper() for each in v.hexes(400, 12)]),
        "session_id": ("category", v.hexes(500, 13)),
        "timestamp": ("time", [int(each) for each in v.times("%s", "2018-11-01", 6, sort=True)]),
        "step": ("number|category", v.count(25, 1)),
        "action_type": ("label", v.some(actions)),
        "reference": ("category", v.ids(800, 5001, 11_282_894)),
        "platform": ("category", v.some(["US", "BR", "UK", "AU", "FR", "MX"])),
        "city": ("category", [f"{each}, USA" for each in v.words(300)]),
        "device": ("category", v.some(["mobile", "desktop", "tablet"])),
        "current_filters": ("list", v.missing(v.lists(filters, "|", 3), 0.7)),
        "impressions": ("list", v.missing(v.lists(sorted(set(hotels)), "|", 12), 0.5)),
        "prices": ("list", v.missing(v.lists([str(n) for n in range(30, 400)], "|", 12), 0.5)),
    }


def black_friday(v: Values) -> Layout:
    return {
        "User_ID": ("category", v.ids(900, 1_000_001, 1_006_041)),
        "Product_ID": ("category", [f"P{n:08}" for n in v.ids(900, 69_042, 375_436)]),
        "Gender": ("category", v.some(["M", "F"])),
        "Age": ("category", v.some(["0-17", "18-25", "26-35", "36-45", "46-50", "51-55", "55+"])),
        "Occupation": ("category", v.codes(21)),
        "City_Category": ("category", v.some(list("ABC"))),
        "Stay_In_Current_City_Years": ("category", v.some(["0", "1", "2", "3", "4+"])),
        "Marital_Status": ("category|number", v.flag(0.41)),
        "Product_Category_1": ("category", v.codes(20, 1)),
        "Product_Category_2": ("category", v.floats(v.missing(v.codes(17, 2), 0.31))),
        "Product_Category_3": ("category", v.floats(v.missing(v.codes(16, 3), 0.69))),
        "Purchase": ("label", v.heavy(8000, 0.5)),
    }


def crimes(v: Values) -> Layout:
    return {
        "ID": ("drop|category", v.unique(634, 13_000_000)),
        "Case Number": ("drop|category", [f"H{'XYZ'[n % 3]}{n:06}" for n in v.unique(100_000, 999_999)]),
        "Date": ("time", v.times("%m/%d/%Y %I:%M:%S %p", "2012-01-01", 1500)),
        "Block": (
            "category|drop",
            [f"{n:03}XX W {each.upper()} ST" for n, each in zip(v.codes(90, 1), v.words(150), strict=True)],
        ),
        "IUCR": ("category", v.some(["0486", "0820", "1811", "0560", "141A", "0460", "2024", "0810"])),
        "Primary Type": ("category", v.some(["THEFT", "BATTERY", "NARCOTICS", "ASSAULT", "MOTOR VEHICLE THEFT"])),
        "Description": ("category", v.some(["$500 AND UNDER", "SIMPLE", "DOMESTIC BATTERY SIMPLE", "OVER $500"])),
        "Location Description": ("category", v.some(["STREET", "RESIDENCE", "CHA PARKING LOT/GROUNDS", "SIDEWALK"])),
        "Arrest": ("label", v.flag(0.27, ("false", "true"))),
        "Domestic": ("category", v.flag(0.13, ("false", "true"))),
        "Beat": ("category", [f"{n:04}" for n in v.ids(270, 111, 2536)]),
        "District": ("category", [f"{n:03}" for n in v.some(range(1, 26))]),
        "Ward": ("category", v.floats(v.some(range(1, 51)))),
        "Community Area": ("category", v.floats(v.some(range(1, 78)))),
        "FBI Code": ("category", v.some(["06", "08B", "14", "18", "26", "05", "07", "11"])),
        "X Coordinate": ("number", v.floats(v.around(1_164_500, 17_000))),
        "Y Coordinate": ("number", v.floats(v.around(1_885_700, 32_000))),
        "Year": ("number|category", v.some(range(2012, 2018))),
        "Updated On": ("time", v.times("%m/%d/%Y %I:%M:%S %p", "2016-01-01", 500)),
        "Latitude": ("number", v.fraction(41.64, 42.02, 9)),
        "Longitude": ("number", v.fraction(-87.93, -87.52, 9)),
        "Location": (
            "category|drop|list",
            [f"({a}, {b})" for a, b in zip(v.fraction(41, 42, 9), v.fraction(-88, -87, 9), strict=True)],
        ),
    }


def no_show(v: Values) -> Layout:
    names = ["Scholarship", "Hipertension", "Diabetes", "Alcoholism", "SMS_received"]
    return {
        "PatientId": ("category", [f"{n}.0" for n in v.ids(1200, 39_217, 999_981_631_772_427)]),
        "AppointmentID": ("drop|category", v.unique(5_030_230, 5_790_484)),
        "Gender": ("category", v.some(["F", "M"])),
        "ScheduledDay": ("time", v.times("%Y-%m-%dT%H:%M:%SZ", "2016-04-29", 40)),
        "AppointmentDay": ("time", v.times("%Y-%m-%dT00:00:00Z", "2016-04-29", 40)),
        "Age": ("number", v.around(37, 23, -1, 115)),
        "Neighbourhood": ("category", [each.upper() for each in v.words(81)]),
        **{name: ("category|number", v.flag(0.1)) for name in names},
        "Handcap": ("category|number", v.some([0, 1, 2, 3, 4], [98, 1.5, 0.3, 0.1, 0.1])),
        "No-show": ("label", v.flag(0.2, ("No", "Yes"))),
    }


def netflix(v: Values) -> Layout:
    people = [f"{v.word(n)} {v.word(11 * n + 5)}" for n in range(900)]
    kinds = ["Dramas", "International Movies", "Comedies", "Action & Adventure", "Thrillers", "Docuseries"]
    return {
        "show_id": ("drop|category", [f"s{n}" for n in v.rows()]),
        "type": ("label", v.flag(0.3, ("Movie", "TV Show"))),
        "title": ("drop|category", v.titles(0, 1, 4)),
        "director": ("category|list|drop", v.missing(v.lists(people, ", ", 2), 0.3)),
        "cast": ("list", v.missing(v.lists(people, ", ", 8), 0.09)),
        "country": ("category|list", v.missing(v.lists(["United States", "India", "France", "Spain"], ", ", 3), 0.09)),
        "date_added": ("time", v.times("%B %-d, %Y", "2016-01-01", 1800)),
        "release_year": ("number|category", v.around(2014, 8, 1925, 2021)),
        "rating": ("category", v.some(["TV-MA", "TV-14", "PG-13", "R", "TV-Y7", "NR"])),
        "duration": ("category", v.some(["1 Season", "2 Seasons", "90 min", "94 min", "106 min", "97 min"])),
        "listed_in": ("list", v.lists(kinds, ", ", 3)),
        "description": ("drop", v.titles(0, 15, 25)),
    }


SECOND: Mapping[str, tuple[str, Callable[[Values], Layout]]] = {
    "hotel bookings": ("is_canceled", hotel_bookings),
    "credit card default": ("default payment next month", credit_default),
    "lending club": ("loan_status=Fully Paid", lending_club),
    "rossmann": ("Sales", rossmann),
    "fraud of IEEE-CIS": ("isFraud", fraud),
    "porto seguro": ("", safe_driver),
    "avito context ads": ("IsClick", avito),
    "trivago sessions": ("action_type=clickout item", trivago),
    "black friday": ("", black_friday),
    "crimes of Chicago": ("Arrest=true", crimes),
    "medical no-shows": ("No-show=Yes", no_show),
    "netflix titles": ("type=Movie", netflix),
}
