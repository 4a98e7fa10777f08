"""The fault matrix: each fault as a real job, and what is known of its rows, exit codes and state afterwards."""
