-- The plans that advances, slices, legs and claims name.
SELECT DISTINCT plan_id FROM (
    SELECT plan_id FROM consumption
    UNION ALL
    SELECT plan_id FROM slices
    UNION ALL
    SELECT unnest(regexp_extract_all(leg_json, '\b[0-9a-f]{24}\b')) FROM consumption WHERE kind = 'leg'
    UNION ALL
    SELECT unnest(list_concat(claim.plan_ids, claim.leg_plan_ids)) FROM consumption WHERE kind = 'claim'
);
