"""The same requests to SGLang's own HTTP server and to inferbus, and the answers side by side."""
