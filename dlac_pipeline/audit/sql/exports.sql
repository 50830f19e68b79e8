-- One row per file of weights exported from a checkpoint: its time, and the BLAKE3 digest that identifies a deployed file.
CREATE OR REPLACE VIEW exports AS
SELECT
    e.run, e.checkpoint_id, c.step, c.model_digest, e.committed_at AS exported_at,
    e.export.digest AS file_digest, e.export.bytes, e.export.file, e.export.part
FROM consumption AS e JOIN consumption AS c ON c.run = e.run AND c.checkpoint_id = e.checkpoint_id AND c.kind = 'checkpoint'
WHERE e.kind = 'export';
