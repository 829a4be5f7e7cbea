"""Text requests to engine requests, engine outputs back to text; pure and synchronous."""
