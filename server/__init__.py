"""The server: requests over HTTP in OpenAI's form, one thread that decodes, a page to chat on."""
