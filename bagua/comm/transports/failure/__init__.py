"""Who is lost, and why: what ranks whose connections broke find out about each other."""
