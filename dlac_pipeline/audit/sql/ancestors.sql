-- One row per branch that led to a checkpoint, its own one included, with the last seq of it that did. The checkpoint is on the
-- surviving lineage or not. Its ancestors may be in other runs, through forks.
CREATE OR REPLACE MACRO ancestor_branches(checkpoint) AS TABLE
WITH RECURSIVE
-- The argument is renamed first, because it may be a column of a caller's table.
dlac_target AS (
    FROM (VALUES (checkpoint)) AS arguments (target_checkpoint)
),
dlac_walk AS (
    SELECT b.run, b.branch, b.seq AS upto, b.branch_parent, b.parent_run
    FROM dlac_target JOIN branch_checkpoints AS b ON b.checkpoint_id = target_checkpoint
    UNION
    SELECT b.run, b.branch, b.seq, b.branch_parent, b.parent_run
    FROM dlac_walk JOIN branch_checkpoints AS b
        ON b.run = dlac_walk.parent_run AND b.checkpoint_id = dlac_walk.branch_parent
        -- Each run counts its own seq. Within a run a parent is always older.
        AND (b.run <> dlac_walk.run OR b.seq < dlac_walk.upto)
)
SELECT run, branch, upto FROM dlac_walk;

-- One row per checkpoint: the given one and its ancestors. FROM ancestors('run-000000010-1a2b').
CREATE OR REPLACE MACRO ancestors(checkpoint) AS TABLE
SELECT b.run, b.checkpoint_id, b.seq
FROM ancestor_branches(checkpoint) AS dlac_walk
JOIN branch_checkpoints AS b ON b.run = dlac_walk.run AND b.branch = dlac_walk.branch AND b.seq <= dlac_walk.upto;
