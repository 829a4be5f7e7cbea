"""What each method of KV compression costs in quality, and what it saves, beside full KV."""
