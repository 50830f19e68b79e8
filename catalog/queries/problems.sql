-- Runs whose ledger, plans and data files disagree. A sound lakehouse has no row.
SELECT run, problem FROM problems ORDER BY run, problem;
