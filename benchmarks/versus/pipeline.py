TABLES = "warehouse district customer stock orders order_line payment probe"


def build(p):
    shop = p.capture("shop")
    for table in TABLES.split():
        p.table(table, shop.table(f"public.{table}"))
