"""What strangers and accidents bring: each case must end in our own words, with nothing lost."""
