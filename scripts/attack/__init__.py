"""Parts of attack_server.py: requests that harm, and what a server may answer."""
