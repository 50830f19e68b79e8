-- One row per kind of thing in which the ledger and the plans do not agree, as a sentence; none where all is well.
CREATE OR REPLACE VIEW problems AS
SELECT run, problem FROM lineage_problems
UNION ALL
SELECT run, problem FROM leg_problems
UNION ALL
SELECT run, problem FROM cut_problems
UNION ALL
SELECT run, problem FROM advance_problems;
