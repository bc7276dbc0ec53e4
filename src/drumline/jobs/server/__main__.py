"""Run the server with `python -m drumline.jobs.server`."""

from drumline.jobs.server.process import main

if __name__ == "__main__":
    main()
