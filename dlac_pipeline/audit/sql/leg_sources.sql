-- One row per source of each leg: the plans that the leg binds, and the cursors at its beginning. `source` is the number of the
-- source. `passes` counts over the whole run (0: endless). `upcoming` are the plans to be cut next, [plan, passes over it].
CREATE OR REPLACE VIEW leg_sources AS
WITH numbered AS (
    SELECT run, leg, seq, streamed, unnest(range(sources)) AS source, leg_json FROM legs
),
taken AS (
    SELECT *, json_extract(leg_json, format('$.sources[{}]', source)) AS bound FROM numbered
)
SELECT
    run, leg, seq, source::INTEGER AS source, bound->>'name' AS name, (bound->>'passes')::BIGINT AS passes,
    bound->>'follow' AS follow, (bound->>'active')::BOOLEAN AS active,
    (leg_json->'sequences'->>'length')::BIGINT > 0 OR bound->>'transform' <> '' AS streamed,
    (bound->'start'->>'next_pass')::BIGINT AS next_pass,
    from_json(bound->'start'->'open', '[{"pass_index": "BIGINT", "plan_id": "VARCHAR", "live_plan_id": "VARCHAR"}]') AS open,
    from_json(bound->'start'->'upcoming', '[["VARCHAR"]]') AS upcoming,
    from_json(bound->'start'->'cursors', '[["BIGINT"]]') AS cursors
FROM taken;
