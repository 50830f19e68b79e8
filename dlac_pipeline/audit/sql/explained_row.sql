-- 3. An example: row {row} of a data file, and a head of run {run}.
-- 3a. The position of the row in each pass over its file: from its work unit, slice and block, by the inverse permutation.
FROM row_positions({file}, {row});

-- 3b. The checkpoint and its ancestors, through forks also in other runs. The model has seen the rows that these consumed.
FROM ancestors({checkpoint}) ORDER BY run, seq;

-- 3c. The advances of these checkpoints that cover the position.
SELECT a.checkpoint_id, a.pass, a.key_group, a.block, a.position_start, r.position, a.position_end, a.applied
FROM row_positions({file}, {row}) AS r JOIN consumption AS a USING (cut_id, plan_id, key_group, block)
WHERE a.kind IN ('advance', 'replay') AND r.position >= a.position_start AND r.position < a.position_end
    AND a.checkpoint_id IN (SELECT checkpoint_id FROM ancestors({checkpoint}));

-- 3d. The same in one call: true if the checkpoint has consumed the row.
SELECT consumed({file}, {row}, {checkpoint}) AS consumed;

-- 3e. The same by the values of its identity columns, if rows have keys, also after the data file is gone:
-- FROM seen_by((SELECT key FROM keys_of(['4711'])));
