-- The checkpoint and its ancestors, whether they are on the surviving lineage or not, and through forks those in other runs:
-- FROM ancestors('run-000000010-1a2b').
CREATE OR REPLACE MACRO ancestors(checkpoint) AS TABLE
WITH RECURSIVE
-- The argument gets a name of its own before anything else is in sight: it may be a column of a caller's table.
asked AS (
    FROM (VALUES (checkpoint)) AS arguments (asked_checkpoint)
),
walk AS (
    SELECT b.run, b.branch, b.seq AS upto, b.branch_parent, b.parent_run
    FROM asked JOIN branch_checkpoints AS b ON b.checkpoint_id = asked_checkpoint
    UNION
    SELECT b.run, b.branch, b.seq, b.branch_parent, b.parent_run
    FROM walk JOIN branch_checkpoints AS b
        ON b.run = walk.parent_run AND b.checkpoint_id = walk.branch_parent
        -- Each run counts its own seq; within one a parent is always older.
        AND (b.run <> walk.run OR b.seq < walk.upto)
)
SELECT b.run, b.checkpoint_id, b.seq
FROM walk JOIN branch_checkpoints AS b ON b.run = walk.run AND b.branch = walk.branch AND b.seq <= walk.upto;
