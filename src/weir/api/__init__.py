"""The edge: HTTP in, HTTP out. Parses, identifies, renders; decides nothing about money, order or placement."""
