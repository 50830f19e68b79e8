-- One row per finished run: where it ended. A rewind opens a finished run again.
CREATE OR REPLACE VIEW finishes AS
SELECT run, max(seq) AS seq, arg_max(step, seq) AS step
FROM consumption
WHERE kind IN ('finish', 'rewind')
GROUP BY run
HAVING arg_max(kind, seq) = 'finish';
