-- The plans that advances, slices, and the JSON of legs and claims name.
SELECT DISTINCT plan_id FROM (
    SELECT plan_id FROM consumption
    UNION ALL
    SELECT plan_id FROM slices
    UNION ALL
    SELECT unnest(regexp_extract_all(detail, '\b[0-9a-f]{24}\b')) FROM consumption WHERE kind IN ('leg', 'claim')
);
