"""Several machines that train one run: how they meet, which ranks each of them takes, and what they tell each other."""
