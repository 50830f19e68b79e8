-- One row per run and source: which table it read, and the fate of its rows.
SELECT run, source, name, passes_entered, rows_consumed, rows_duplicated, rows_missing, rows_filtered, rows_quarantined
FROM sources
ORDER BY run, source;
