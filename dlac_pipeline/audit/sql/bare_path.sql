-- A path without its file scheme. Data files are named file:///a/b or /a/b, and both mean the same file.
CREATE OR REPLACE MACRO bare_path(path) AS regexp_replace(path, '^file:(//)?', '');
