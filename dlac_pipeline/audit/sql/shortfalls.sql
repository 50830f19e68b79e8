-- One row per key group and checkpoint of a surviving lineage that records the wrong steps or the wrong number of rows. `rows`
-- is NULL if only the steps are checked.
CREATE OR REPLACE VIEW shortfalls AS
SELECT * EXCLUDE (is_due) FROM uneven_shares WHERE NOT is_due;
