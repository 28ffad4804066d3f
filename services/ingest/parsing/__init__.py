"""Bytes of a document to blocks of text with their places. No database, no network.

`sandbox.ParserPool` is the way in for the worker; `formats.parse` does the work inside
a sandboxed process.
"""
