"""Programs that show DLAC: a GPT, the quickstart, and the demo."""
