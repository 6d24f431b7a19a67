"""Requests as people type them, made of tasks, topics and names: our own words, so that none is anybody's."""

import random

TOPICS = (
    "the water cycle", "volcanoes", "photosynthesis", "black holes", "the French Revolution", "the Silk Road",
    "the printing press", "the Roman Empire", "ancient Egypt", "the industrial revolution", "the moon landing",
    "jazz music", "impressionist painting", "Greek mythology", "chess", "basketball", "marathon running", "yoga",
    "gardening", "baking bread", "Italian cooking", "healthy breakfasts", "coffee", "tea", "beekeeping",
    "dog training", "keeping cats", "wild birds", "whales", "dinosaurs", "rainforests", "deserts", "coral reefs",
    "glaciers", "climate change", "recycling", "solar energy", "wind power", "electric cars", "bicycles", "trains",
    "airplanes", "bridges", "skyscrapers", "city parks", "public libraries", "museums", "travelling to Hawaii",
    "a weekend in Paris", "camping in the mountains", "sailing", "learning a language", "learning to swim",
    "playing the guitar", "playing the piano", "photography", "painting with watercolours", "writing a novel",
    "poetry", "public speaking", "job interviews", "time management", "remote work", "teamwork", "leadership",
    "saving money", "personal budgets", "the stock market", "inflation", "supply and demand", "small businesses",
    "marketing", "customer service", "social media", "online privacy", "passwords", "computer viruses",
    "artificial intelligence", "machine learning", "neural networks", "databases", "operating systems",
    "the internet", "web browsers", "programming in Python", "sorting algorithms", "recursion", "binary search",
    "linked lists", "prime numbers", "fractions", "the Pythagorean theorem", "probability", "statistics", "gravity",
    "electricity", "magnets", "atoms", "chemical reactions", "acids and bases", "DNA", "cells", "the human heart",
    "the immune system", "vaccines", "vitamins", "sleep", "stress", "friendship", "kindness", "honesty", "courage",
    "democracy", "human rights", "the United Nations", "elections", "the court system", "copyright", "education",
    "homework", "school uniforms", "video games", "board games", "science fiction films", "fairy tales", "dragons",
    "robots", "space travel", "time travel", "a lost key", "an old lighthouse", "a talking tree", "a rainy day",
    "the first day of school", "a birthday party", "a family dinner", "moving to a new town", "autumn", "snow",
)  # fmt: skip
"""What a request is about."""

ROLES = (
    "a teacher", "a doctor", "a tour guide", "a chef", "a detective", "a pirate", "a scientist", "a lawyer", "a coach",
    "a poet", "a journalist", "an astronaut", "a librarian", "a farmer", "an engineer", "a historian", "a wizard",
)  # fmt: skip
"""Who the model is asked to be."""

READERS = ("a child", "a beginner", "a busy manager", "a student", "my grandmother", "an expert", "a friend")
"""Whom the text is for."""

NAMES = ("Anna", "Ben", "Carla", "David", "Elena", "Farid", "Grace", "Hugo", "Iris", "Jonas", "Kim", "Lena", "Omar")
"""People in sums and letters."""

THINGS = ("apples", "books", "marbles", "tickets", "cookies", "stamps", "pencils", "bottles", "chairs", "flowers")
"""What they count."""

LANGUAGES = ("Python", "JavaScript", "Java", "C", "C++", "Rust", "Go", "SQL", "HTML and CSS", "a shell script")
"""What programs are asked for in."""

PROGRAMS = (
    "checks whether a string is a palindrome", "finds the largest number in a list", "counts words in a text file",
    "reverses a linked list", "computes the nth Fibonacci number", "sorts a list of dictionaries by a key",
    "removes duplicates from a list", "merges two sorted lists", "finds all prime numbers below n",
    "reads a CSV file and prints the mean of each column", "converts Celsius to Fahrenheit", "validates an email",
    "finds the longest word in a sentence", "implements a stack with push and pop", "computes a factorial",
    "groups words by their first letter", "finds the common elements of two arrays", "rotates a matrix",
    "generates a random password", "parses a date", "counts vowels", "implements binary search", "flattens a list",
    "checks whether brackets are balanced", "finds the shortest path in a grid", "computes the median of a list",
)  # fmt: skip
"""What the programs do."""

TASKS = (
    "What is the history of {topic}?", "Explain {topic} to {reader}.", "Write a short story about {topic}.",
    "Write a poem about {topic}.", "What are the pros and cons of {topic}?", "Give me five facts about {topic}.",
    "Write a blog post about {topic} for {reader}.", "How does {topic} compare with {other}?",
    "What are common mistakes that people make with {topic}?", "Write an email to {name} about {topic}.",
    "Make a list of ten questions about {topic}.", "Summarize what is known about {topic} in three sentences.",
    "Describe {topic} as if you were {role}.", "Pretend to be {role} and talk with {reader} about {topic}.",
    "Why does {topic} matter?", "What should {reader} know about {topic}?", "Write a dialogue about {topic}.",
    "Give step by step advice on {topic}.", "What is the connection between {topic} and {other}?",
    "Write a product description that mentions {topic}.", "Tell me a joke about {topic}.", "Tell me about {topic}.",
    "Write the opening paragraph of an essay on {topic}.", "Plan a lesson about {topic} for {reader}.",
    "Argue for and against {topic}.", "Write a letter from {name} to {name2} about {topic} and {other}.",
    "Imagine a world without {topic}. What would it be like?", "How did {topic} change the way people live?",
    "Write a persuasive speech about {topic}.", "Give an example of {topic} from daily life and explain it.",
    "Create an outline for a talk on {topic}.", "Write a haiku about {topic}.", "Define {topic} in one sentence.",
    "Write {program_article} program in {language} that {program}.", "How do I write code in {language} that {program}?",
    "Explain how {language} code that {program} works.", "Write a function in {language} that {program}, with tests.",
    "{name} has {n} {things} and gives {m} of them to {name2}. How many are left? Explain.",
    "{name} buys {n} {things} for {m} dollars each. What is the total cost?",
    "If {name} reads {m} pages a day, how long does a book of {n} pages take? Show your work.",
    "A train travels {n} miles in {m} hours. What is its average speed?",
    "Solve for x: {m}x + {k} = {n}.", "What is {m} percent of {n}?", "Is {n} a prime number? Explain why.",
    "Turn this into a table: {name} is {m} years old and likes {topic}; {name2} is {k} and likes {other}.",
    "Extract the names and numbers: {name} sold {n} {things} to {name2} on day {m}.",
    "Rewrite this politely: I do not care about {topic}, {name}!", "Correct this sentence: {name} dont likes {topic}.",
    "Translate into simple English: The significance of {topic} cannot be overstated.",
    "Which of these does not belong: {topic}, {other}, {things}? Give a reason.",
    "Classify the mood of this review: I loved the book about {topic}, but the part on {other} was dull.",
)  # fmt: skip
"""Requests with holes."""


def chat_request(rng: random.Random) -> str:
    """One request. Different draws seldom give the same."""
    topic, other = rng.sample(TOPICS, 2)
    name, name2 = rng.sample(NAMES, 2)
    m, n = sorted(rng.sample(range(2, 400), 2))
    return rng.choice(TASKS).format(
        topic=topic,
        other=other,
        name=name,
        name2=name2,
        role=rng.choice(ROLES),
        reader=rng.choice(READERS),
        things=rng.choice(THINGS),
        language=rng.choice(LANGUAGES),
        program=rng.choice(PROGRAMS),
        program_article=rng.choice(("a", "a short", "a simple", "a well documented")),
        m=m,
        n=n,
        k=rng.randrange(2, 60),
    )
