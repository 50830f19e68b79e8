-- The cuts that advances name.
SELECT DISTINCT cut_id FROM consumption;
