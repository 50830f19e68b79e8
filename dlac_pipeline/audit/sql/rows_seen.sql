-- One row per run, source, row of a relation, and checkpoint that has read it: FROM rows_seen('rows', 'run-000000010-1a2b'). It is
-- the given checkpoint or an ancestor. The relation is that of `readers`.
CREATE OR REPLACE MACRO rows_seen(places, checkpoint) AS TABLE
WITH
-- The ancestors are found first, where no table's columns hide the argument.
dlac_seen AS (
    SELECT checkpoint_id FROM ancestors(checkpoint)
)
SELECT run, source, file_path, row, checkpoint_id
FROM readers(places)
WHERE checkpoint_id IN (FROM dlac_seen);
