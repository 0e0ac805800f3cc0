"""The comparison of policies: what is run, how, and the page of results."""
