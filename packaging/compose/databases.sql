CREATE TABLE orders (id bigint PRIMARY KEY, customer text NOT NULL, cents bigint NOT NULL);
INSERT INTO orders VALUES (1, 'ada', 1250), (2, 'grace', 900);
CREATE DATABASE tidemill;
