-- One row per pass that a run has entered: a cut, by the source's number and the pass.
CREATE OR REPLACE VIEW cuts AS
SELECT run, source, pass, cut_id, min(seq) AS seq
FROM advances
GROUP BY ALL;
