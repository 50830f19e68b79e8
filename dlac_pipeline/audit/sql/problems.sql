-- One row per kind of disagreement between the ledger and the plans of a run, as a sentence. A sound run has none.
CREATE OR REPLACE VIEW problems AS
SELECT run, problem FROM lineage_problems
UNION ALL
SELECT run, problem FROM leg_problems
UNION ALL
SELECT run, problem FROM cut_problems
UNION ALL
SELECT run, problem FROM replay_problems
UNION ALL
SELECT run, problem FROM advance_problems;
