"""Who runs how many tokens in a step: policies, drafts, admission."""
