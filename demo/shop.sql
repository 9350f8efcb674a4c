-- Harbour Shop: a TPC-C-like schema. Each business transaction is one function, which costs one round trip.
-- Invariant: sum(warehouse.ytd) = sum(district.ytd) = sum(payment.amount), in every snapshot.

CREATE TABLE warehouse (
    w_id int PRIMARY KEY,
    name text NOT NULL,
    ytd  numeric(14,2) NOT NULL DEFAULT 0
);
CREATE TABLE district (
    w_id int NOT NULL,
    d_id int NOT NULL,
    next_order int NOT NULL DEFAULT 1,
    ytd  numeric(14,2) NOT NULL DEFAULT 0,
    PRIMARY KEY (w_id, d_id)
);
CREATE TABLE customer (
    c_id bigint PRIMARY KEY,
    w_id int NOT NULL,
    d_id int NOT NULL,
    name text NOT NULL,
    balance numeric(12,2) NOT NULL DEFAULT 0,
    payments int NOT NULL DEFAULT 0,
    note text                              -- several kB, stored out of line (TOAST), rarely touched
);
ALTER TABLE customer ALTER COLUMN note SET STORAGE EXTERNAL;
CREATE TABLE stock (
    w_id int NOT NULL,
    product_id bigint NOT NULL,
    quantity int NOT NULL,
    price numeric(8,2) NOT NULL,
    PRIMARY KEY (w_id, product_id)
);
CREATE TABLE orders (
    o_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    w_id int NOT NULL,
    d_id int NOT NULL,
    c_id bigint NOT NULL,
    status text NOT NULL DEFAULT 'open',
    total numeric(12,2) NOT NULL,
    placed_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX orders_open ON orders (w_id, o_id) WHERE status = 'open';
CREATE TABLE order_line (
    o_id bigint NOT NULL,
    line int NOT NULL,
    product_id bigint NOT NULL,
    quantity int NOT NULL,
    amount numeric(12,2) NOT NULL,
    PRIMARY KEY (o_id, line)
);
CREATE TABLE payment (
    p_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    w_id int NOT NULL,
    d_id int NOT NULL,
    c_id bigint NOT NULL,
    amount numeric(10,2) NOT NULL,
    paid_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE FUNCTION shop_new_order(w int, d int, c bigint, products bigint[]) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    o bigint;
BEGIN
    UPDATE district SET next_order = next_order + 1 WHERE w_id = w AND d_id = d;
    INSERT INTO orders (w_id, d_id, c_id, total)
        SELECT w, d, c, coalesce(sum(price), 0) FROM stock WHERE w_id = w AND product_id = ANY (products)
        RETURNING o_id INTO o;
    INSERT INTO order_line (o_id, line, product_id, quantity, amount)
        SELECT o, row_number() OVER (ORDER BY product_id), product_id, 1, price
        FROM stock WHERE w_id = w AND product_id = ANY (products);
    -- locked in key order, so that two orders of the same products cannot deadlock
    PERFORM 1 FROM stock WHERE w_id = w AND product_id = ANY (products) ORDER BY product_id FOR UPDATE;
    UPDATE stock SET quantity = CASE WHEN quantity > 1 THEN quantity - 1 ELSE 100 END
        WHERE w_id = w AND product_id = ANY (products);
    RETURN o;
END $$;

CREATE FUNCTION shop_payment(w int, d int, c bigint, paid numeric) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    UPDATE customer SET balance = balance - paid, payments = payments + 1 WHERE c_id = c;
    INSERT INTO payment (w_id, d_id, c_id, amount) VALUES (w, d, c, paid);
    UPDATE district SET ytd = ytd + paid WHERE w_id = w AND d_id = d;
    UPDATE warehouse SET ytd = ytd + paid WHERE w_id = w;
END $$;

CREATE FUNCTION shop_deliver(w int) RETURNS void LANGUAGE sql AS $$
    UPDATE orders SET status = 'delivered' WHERE o_id IN
        (SELECT o_id FROM orders WHERE w_id = w AND status = 'open' ORDER BY o_id LIMIT 12 FOR UPDATE SKIP LOCKED);
$$;

CREATE FUNCTION shop_cancel(w int) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    o bigint;
BEGIN
    DELETE FROM orders WHERE o_id =
        (SELECT o_id FROM orders WHERE w_id = w AND status = 'open' ORDER BY o_id DESC LIMIT 1 FOR UPDATE SKIP LOCKED)
        RETURNING o_id INTO o;
    DELETE FROM order_line WHERE o_id = o;
END $$;

CREATE FUNCTION shop_note(c bigint, new_note text) RETURNS void LANGUAGE sql AS $$
    UPDATE customer SET note = new_note WHERE c_id = c;
$$;
