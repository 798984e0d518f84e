"""The production cycle over simulated jobs and time: the same policies, fit and plan, on recorded jobs."""
