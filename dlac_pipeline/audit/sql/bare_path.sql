-- A path without its file scheme: data files are named as file:///a/b or as /a/b, and both mean the same file.
CREATE OR REPLACE MACRO bare_path(path) AS regexp_replace(path, '^file:(//)?', '');
