-- One row per checkpoint, of any run and branch, whose model has seen a row of a relation: it has read the row itself (reads), or
-- descends from a checkpoint that did, also through rewinds and through forks of other runs. FROM affected('rows'). The relation
-- is that of `readers`. The walk takes one step per branch, not one per checkpoint.
CREATE OR REPLACE MACRO affected(places) AS TABLE
WITH RECURSIVE
dlac_own AS (
    SELECT DISTINCT run, checkpoint_id FROM readers(places)
),
dlac_begun AS (
    SELECT run, branch, min(seq) AS first_seq, any_value(branch_parent) AS branch_parent, any_value(parent_run) AS parent_run
    FROM branch_checkpoints
    GROUP BY run, branch
),
dlac_grown AS (
    SELECT g.run, g.branch, g.first_seq, p.run AS parent_run, p.branch AS parent_branch, p.seq AS parent_seq
    FROM dlac_begun AS g JOIN branch_checkpoints AS p ON p.run = g.parent_run AND p.checkpoint_id = g.branch_parent
),
dlac_walk AS (
    SELECT b.run, b.branch, min(b.seq) AS since
    FROM dlac_own JOIN branch_checkpoints AS b USING (run, checkpoint_id)
    GROUP BY b.run, b.branch
    UNION
    SELECT g.run, g.branch, g.first_seq
    FROM dlac_walk JOIN dlac_grown AS g
        ON g.parent_run = dlac_walk.run AND g.parent_branch = dlac_walk.branch AND g.parent_seq >= dlac_walk.since
)
SELECT b.run, b.checkpoint_id, b.seq, dlac_own.checkpoint_id IS NOT NULL AS reads
FROM (SELECT run, branch, min(since) AS since FROM dlac_walk GROUP BY run, branch) AS w
JOIN branch_checkpoints AS b ON b.run = w.run AND b.branch = w.branch AND b.seq >= w.since
LEFT JOIN dlac_own ON dlac_own.run = b.run AND dlac_own.checkpoint_id = b.checkpoint_id;
