"""Methods whose rows read the sentences that suit the one being written."""
