"""The shop's tables and its weighted transactions, all drawn from one seeded source.

The weights follow TPC-C: orders and payments dominate. Deliveries limit the number of open orders, cancellations delete
rows, and notes rewrite a TOASTed column that payments leave unchanged.
"""

from __future__ import annotations

from pathlib import Path

import psycopg

from tidemill.base.clock import Rand

WAREHOUSES = 2
DISTRICTS = 10
CUSTOMERS = 600
PRODUCTS = 100
TABLES = ("warehouse", "district", "customer", "stock", "orders", "order_line", "payment")

_WEIGHTS = {"new_order": 45, "payment": 43, "deliver": 5, "cancel": 4, "note": 3}
_DECK = tuple(kind for kind, weight in _WEIGHTS.items() for _ in range(weight))
_LETTERS = "abcdefghijklmnopqrstuvwxyz "


def create(dsn: str, rand: Rand) -> bool:
    """Create the schema and its initial rows in one transaction. Return False if they exist already."""
    with psycopg.connect(dsn) as connection:
        found = connection.execute("SELECT to_regclass('public.payment') IS NOT NULL").fetchone()
        if found and found[0]:
            return False
        connection.execute(Path(__file__).with_name("shop.sql").read_text(encoding="utf-8"))
        cursor = connection.cursor()
        for w in range(1, WAREHOUSES + 1):
            cursor.execute("INSERT INTO warehouse (w_id, name) VALUES (%s, %s)", (w, f"Harbour {w}"))
            cursor.executemany(
                "INSERT INTO district (w_id, d_id) VALUES (%s, %s)", [(w, d) for d in range(1, DISTRICTS + 1)]
            )
            cursor.executemany(
                "INSERT INTO stock (w_id, product_id, quantity, price) VALUES (%s, %s, %s, %s)",
                [(w, p, 50 + rand.below(50), f"{1 + rand.below(9900) / 100:.2f}") for p in range(1, PRODUCTS + 1)],
            )
        cursor.executemany(
            "INSERT INTO customer (c_id, w_id, d_id, name, note) VALUES (%s, %s, %s, %s, %s)",
            [(c, 1 + c % WAREHOUSES, 1 + c % DISTRICTS, f"Customer {c}", note(rand)) for c in range(1, CUSTOMERS + 1)],
        )
    return True


def note(rand: Rand) -> str:
    """Return a text of about 4 kB, which PostgreSQL stores out of line (TOAST)."""
    word = "".join(_LETTERS[rand.below(len(_LETTERS))] for _ in range(64))
    return word * 64


def next_transaction(rand: Rand) -> tuple[str, tuple[object, ...]]:
    """Draw one weighted transaction as (SQL, parameters)."""
    w = 1 + rand.below(WAREHOUSES)
    d = 1 + rand.below(DISTRICTS)
    c = 1 + rand.below(CUSTOMERS)
    kind = _DECK[rand.below(len(_DECK))]
    if kind == "new_order":
        products = sorted({1 + rand.below(PRODUCTS) for _ in range(1 + rand.below(6))})
        return "SELECT shop_new_order(%s, %s, %s, %s::bigint[])", (w, d, c, products)
    if kind == "payment":
        return "SELECT shop_payment(%s, %s, %s, %s::numeric)", (w, d, c, f"{1 + rand.below(500_000) / 100:.2f}")
    if kind == "deliver":
        return "SELECT shop_deliver(%s)", (w,)
    if kind == "cancel":
        return "SELECT shop_cancel(%s)", (w,)
    return "SELECT shop_note(%s, %s)", (c, note(rand))
