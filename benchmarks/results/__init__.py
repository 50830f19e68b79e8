"""Results of the programs, kept for the docs, and the page that is made of them."""
