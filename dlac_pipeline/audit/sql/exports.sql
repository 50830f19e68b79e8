-- Files of weights that were made of checkpoints: which, when, and the BLAKE3 digest by which a deployed one is told.
CREATE OR REPLACE VIEW exports AS
SELECT
    e.run, e.checkpoint_id, c.step, c.model_digest, e.committed_at AS exported_at,
    e.detail ->> '$.digest' AS file_digest,
    (e.detail ->> '$.bytes')::BIGINT AS bytes,
    e.detail ->> '$.file' AS file,
    e.detail ->> '$.part' AS part
FROM consumption AS e JOIN consumption AS c ON c.run = e.run AND c.checkpoint_id = e.checkpoint_id AND c.kind = 'checkpoint'
WHERE e.kind = 'export';
