"""Pages, tables and files made from a report; nothing here computes what the report does not hold or determine."""
