-- One row per run whose ledger lacks appends, as after a rebuild from an incomplete journal: what the lost ones had read is unknown.
CREATE OR REPLACE VIEW lost_appends AS
SELECT run, count(DISTINCT seq) AS found, max(seq) AS last_seq
FROM consumption
GROUP BY run
HAVING count(DISTINCT seq) < max(seq);
