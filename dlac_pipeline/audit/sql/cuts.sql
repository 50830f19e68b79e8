-- One row per cut that a run has entered: the order of one pass over one source. `source` is the number of the source.
CREATE OR REPLACE VIEW cuts AS
SELECT run, source, pass, cut_id, min(seq) AS seq
FROM advances
GROUP BY ALL;
