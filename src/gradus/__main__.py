from gradus.cli.main import main

main()
