-- One row per finished run: its last step. A rewind reopens a finished run.
CREATE OR REPLACE VIEW finishes AS
SELECT run, max(seq) AS seq, arg_max(step, seq) AS step
FROM consumption
WHERE kind IN ('finish', 'rewind')
GROUP BY run
HAVING arg_max(kind, seq) = 'finish';
