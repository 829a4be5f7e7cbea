"""midfill beside other servers on the same machine, through the same loads."""
