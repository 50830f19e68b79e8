-- One row per source that a finished run has read to its end. A run ends with the last of its finite sources, unless its leg
-- names an earlier step.
CREATE OR REPLACE VIEW complete_sources AS
SELECT s.run, s.source, s.name, s.passes
FROM lineage AS c
JOIN legs AS l USING (run, leg)
JOIN leg_sources AS s ON s.run = l.run AND s.leg = l.leg AND s.seq = l.seq
WHERE c.is_head AND s.active AND s.passes > 0 AND s.follow <> 'appends'
    AND (l.steps IS NULL OR c.step < l.steps)
    AND c.run IN (SELECT run FROM finishes);
